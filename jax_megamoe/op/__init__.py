"""`mega_moe`: its checks, the choice of an implementation, and the implementations in JAX."""
