"""The loop, its schedule, its processes, and how a killed run goes on."""
