"""The training loop, its schedule, its processes, and how a killed run continues."""
