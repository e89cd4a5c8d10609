"""The data of a running server: its Prometheus page, and an access log and a step log that grow."""
