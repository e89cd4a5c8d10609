"""An OpenAI-compatible server of a model on its device, or of its twin in real time."""
