"""A token's text in log-probabilities, also where it is only part of a character."""

from llmc.runtime.text.tokenizer import Tokenizer


class TokenTexts:
    """Texts of an engine's tokens by id; without a tokenizer a token is `token_id:17`, as in vLLM."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def text(self, token: int) -> str:
        """The token's text; `bytes:\\xe2\\x80` for one that is not whole characters, as in OpenAI's answers."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._text(self.utf8(token), token)
        return known

    def utf8(self, token: int) -> bytes:
        """The token's bytes in UTF-8; empty without a tokenizer."""
        return self._tokenizer.token_bytes(token)

    def id_text(self, token: int) -> str:
        """The token as `token_id:17`, as vLLM's return_tokens_as_token_ids has it."""
        return f"token_id:{token}"

    def _text(self, data: bytes, token: int) -> str:
        if not data:
            return self.id_text(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
