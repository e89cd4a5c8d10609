"""A twin that follows a running server: reads its metrics, compares each window with a replay, says what changed."""
