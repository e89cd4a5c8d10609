"""An OpenAI-compatible server in front of the engine: the live executor, or the twin in real time."""
