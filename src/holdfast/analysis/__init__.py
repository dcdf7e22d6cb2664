"""What can be computed about a run without training it: plan, chip plan, compiled programs, profile, interpolation."""
