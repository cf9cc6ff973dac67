"""Azure LLM inference traces, 2023 and 2024; dates with and without a zone."""

from kvsim.traces.formats.base import TraceFormat

FORMAT = TraceFormat(
    title="Azure LLM inference CSV (2023, 2024)",
    source="https://github.com/Azure/AzurePublicDataset",
    arrival=(("TIMESTAMP", "date"),),
    prompt=("ContextTokens",),
    generate=("GeneratedTokens",),
)
