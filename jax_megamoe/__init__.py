"""DeepGEMM's MegaMoE kernels as a JAX op."""
