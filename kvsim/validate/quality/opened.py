"""A checkpoint and a text, opened to measure quality."""

import torch

from kvsim.console import print_note
from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.validate.machine import find_device
from kvsim.validate.model.architecture import Architecture
from kvsim.validate.model.checkpoint import Tokeniser, checksum, open_weights, read_tokeniser
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.model.weights import TensorSource, load_weights
from kvsim.validate.quality.facts import PlantedFacts, plant
from kvsim.validate.quality.settings import Reading
from kvsim.validate.quality.text import Text, windows


@frozen
class OpenedCheckpoint:
    """A checkpoint whose weights are not loaded yet."""

    model: str
    arch: Architecture
    source: TensorSource
    device: torch.device
    machine: Deployment

    @classmethod
    def open(cls, model: str, device: str, gpu: str) -> "OpenedCheckpoint":
        """A checkpoint on a device, with the machine that settings are chosen for."""
        where = find_device(device)
        arch, source = open_weights(model)
        machine = Deployment(arch.model, load_hardware(gpu), load_stack("kvsim"))
        return cls(model, arch, source, where, machine)

    def read(
        self, text: Text, reading: Reading, length: int
    ) -> tuple[Decoder, list[list[int]], dict[str, str]]:
        """The decoder, windows of the text, and what a file says of both.

        Parameters
        ----------
        length : positions that the decoder needs. [tokens]
        """
        tokeniser, tokens = self._split(text)
        texts = windows(tokens, reading.windows, reading.length, tokeniser.start)
        print_note(f"loading {self.source.where}")
        weights = load_weights(self.arch, self.source, self.device, torch.float32)
        decoder = Decoder(self.arch, weights, length, deployment=self.machine)
        gpu = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if gpu else "cpu"
        about = {
            "model": self.model,
            "weights": checksum(self.source),
            "text": text.source,
            "settings": f"{name}, fp32, PyTorch {torch.__version__}; {reading.description}",
        }
        return decoder, texts, about

    def facts(self, text: Text, reading: Reading) -> PlantedFacts | None:
        """Facts in windows of the text, as many as are asked for in the tokens that are scored."""
        tokeniser, tokens = self._split(text)
        sizes = reading.windows, reading.prompt, reading.scored + 1
        return plant(tokeniser, tokens, sizes, tokeniser.start)

    def _split(self, text: Text) -> tuple[Tokeniser, list[int]]:
        tokeniser = read_tokeniser(self.source)
        tokens = tokeniser(text.content)
        tokeniser.check(tokens, self.arch.model.vocab)
        return tokeniser, tokens
