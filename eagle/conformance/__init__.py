"""What every method must hold, on a tiny target that is made on the spot: `checks.run_checks` asks it all."""
