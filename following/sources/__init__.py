"""What a running server tells: its Prometheus page, an access log and a step log as they grow."""
