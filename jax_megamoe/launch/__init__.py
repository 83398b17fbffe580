"""From a LaunchPlan to a custom call on a device."""
