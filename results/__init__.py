"""What a run is: its scenario, its folder read back, its metrics and SLOs."""
