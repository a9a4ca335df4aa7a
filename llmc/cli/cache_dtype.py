"""The options of the KV cache: its format, under llmc's and vLLM's names, and the rows that it keeps."""

from typing import Annotated

from typer import Option

from llmc.options import is_dtype

KvCacheDtype = Annotated[
    str,
    Option(
        "--kv-cache-dtype",
        "--kv-dtype",
        "--kv-cache",
        help="format of the KV cache: auto, a dtype, or codes (int8, int4, fp8) such as int8/int4:rotated or "
        "int4:rotated:recent=128",
    ),
]
_COMPRESSION = Option(help="what the KV cache keeps of long sequences, such as stride:step=4,recent=512")
KvCompression = Annotated[str, _COMPRESSION]
# For verbs that also take an engine, where the policy is that of requests that name none.
KvCompressionOfEngine = Annotated[
    str | None, Option(help=f"{_COMPRESSION.help}; also of an engine, if it was built for it")
]


def cache_options(asked: str) -> dict[str, str]:
    """`kv_dtype` and `kv_cache` of BuildOptions for a value of the option, which may be either."""
    return {"kv_dtype": asked, "kv_cache": "auto"} if is_dtype(asked) else {"kv_dtype": "auto", "kv_cache": asked}
