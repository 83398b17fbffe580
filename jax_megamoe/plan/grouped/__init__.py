"""Grouped matrix products, one expert after the other, as steps of a LaunchPlan."""
