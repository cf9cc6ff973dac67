"""Sequences that are being generated: what is decided of them, and how a token is chosen."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.validate.counter import Kind
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.transfer import to_device


class RunningGeneration(ABC):
    """A batch of sequences on its way through a decoder, as drafters and caches see it.

    Between rounds, all tokens of a sequence but the last are in its cache.

    Parameters
    ----------
    decoder
        The model.
    prompts
        Tokens of every prompt, as indices in the vocabulary; all have one length.
    generate
        Tokens to generate per sequence. [tokens]
    temperature
        0 takes the likeliest token, otherwise tokens are drawn.
    seed
        Seed of the generator that draws.
    keep
        Whether to collect in ``logits`` what each token was chosen by.

    Attributes
    ----------
    batch, prompt
        Number of sequences, and tokens of each prompt.
    cached
        Tokens in the cache of each sequence. [tokens]
    done
        Generated tokens of each sequence. [tokens]
    yielded
        Tokens that each round gave, by round and sequence. [tokens]
    last
        Newest token of each sequence, which is not in the cache yet, (batch,).
    tokens
        Generated tokens, (batch, generate).
    prompt_tokens
        All prompts, (batch, prompt).

    Raises
    ------
    InputError
        If there is no prompt, or prompts differ in length.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        generate: int,
        temperature: float,
        seed: int,
        keep: bool,
    ) -> None:
        self.decoder, self.prompts, self.generate = decoder, prompts, generate
        self.temperature, self.keep = temperature, keep
        device = decoder.device
        lengths = sorted({len(prompt) for prompt in prompts})
        if len(lengths) != 1:
            got = " and ".join(map(str, lengths)) or "no"
            raise InputError(
                f"prompts: got {got} tokens; expected prompts of one length; run each length apart"
            )
        # made once and before any clock runs: Python takes 2 ms to convert 8,192 tokens
        self.prompt_tokens = torch.tensor(prompts, device=device)
        self.batch, self.prompt = self.prompt_tokens.shape
        self.cached = [self.prompt] * self.batch
        self.generator = torch.Generator(device).manual_seed(seed)
        self.done = [0] * self.batch
        self.yielded: list[list[int]] = []
        self.last = torch.zeros(self.batch, dtype=torch.long, device=device)
        self.tokens = torch.zeros(self.batch, generate, dtype=torch.long, device=device)
        self.logits: list[list[Tensor]] = [[] for _ in prompts]
        self._on_device = torch.tensor(self.cached, device=device)

    @abstractmethod
    def forward(self, tokens: Tensor, kind: Kind, ahead: int = 0) -> Tensor:
        """Run a forward pass, after which ``done`` is as before.

        Parameters
        ----------
        tokens
            New tokens, (batch, new).
        ahead
            Tokens between the cached ones and the first new one, such as earlier drafts. [tokens]

        Returns
        -------
        Tensor
            Logits, (batch, new, vocab).
        """

    def choose(self, logits: Tensor) -> Tensor:
        """Choose a token for each row of logits, greedily or at random.

        Parameters
        ----------
        logits
            (..., vocab).
        """
        with self.decoder.counter.op("sample") as record:
            record.reads(logits)
            if not self.temperature:
                return logits.argmax(dim=-1)
            shares = self.shares(logits)
            drawn = torch.multinomial(shares.flatten(0, -2), 1, generator=self.generator)
            return drawn.view(shares.shape[:-1])

    def shares(self, logits: Tensor) -> Tensor:
        """Compute the probability of every token at this temperature. (..., vocab), in fp32

        Parameters
        ----------
        logits
            (..., vocab).
        """
        return torch.softmax(logits.float() / self.temperature, dim=-1)

    def emit(
        self, tokens: Tensor, counts: Sequence[int] | None = None, logits: Tensor | None = None
    ) -> None:
        """Append the tokens that a round has decided on; complete sequences take no more.

        Afterwards the cache holds all of a sequence's tokens but the newest.

        Parameters
        ----------
        tokens
            Tokens of the round, (batch, most).
        counts
            How many tokens of each row are valid; None for all. [tokens]
        logits
            Logits that they were chosen by, if they are to be kept.
        """
        tokens = tokens.view(self.batch, -1)
        given = [tokens.shape[1]] * self.batch if counts is None else counts
        taken = [min(n, self.generate - d) for n, d in zip(given, self.done, strict=True)]
        first = not self.done[0]  # the token that the prompt yields: nothing was appended for it
        alike = min(taken) == max(taken)
        if alike and min(self.done) == max(self.done):
            many, done = taken[0], self.done[0]
            if many:
                self.tokens[:, done : done + many] = tokens[:, :many]
                self.last = tokens[:, many - 1]
        else:
            for i, many in enumerate(taken):
                if many:
                    self.tokens[i, self.done[i] : self.done[i] + many] = tokens[i, :many]
                    self.last[i] = tokens[i, many - 1]
        if self.keep and logits is not None:
            for i, many in enumerate(taken):
                self.logits[i] += logits.view(self.batch, -1, logits.shape[-1])[i, :many]
        self.done = [d + n for d, n in zip(self.done, taken, strict=True)]
        if not first:
            self.yielded.append(list(given))
            self.cached = [c + n for c, n in zip(self.cached, taken, strict=True)]
            self._on_device += taken[0] if alike else to_device(taken, self._on_device.device)
