"""The SM90 mega kernel on the emulator against the outputs of an H200, bit for bit."""
