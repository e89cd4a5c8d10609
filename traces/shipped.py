"""The shipped traces, each in a folder with licence and attribution."""

from pathlib import Path

FOLDER = Path(__file__).parent / "shipped"

SHIPPED = {
    "azure-conv": FOLDER / "azure-conv" / "AzureLLMInferenceTrace_conv.csv",
    "mooncake-conv": FOLDER / "mooncake-conv" / "mooncake_conversation_first1800s.jsonl",
}
