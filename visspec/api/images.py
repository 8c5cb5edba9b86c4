"""`ImagePipeline`: image generation in diffusers' conventions, on autoregressive models loaded with transformers."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from tqdm import tqdm

from visspec.api import requests, zoo
from visspec.api.accelerate import own_rule
from visspec.api.copies import Copied
from visspec.api.image_call import ORIGINS as ORIGINS
from visspec.api.image_call import Calls, ImageOutput, Interrupted, Job, Watch, origin_map, pass_numbers
from visspec.loop.pairing import Pairing, pair
from visspec.loop.stats import Stats
from visspec.models.targets.families import family_of
from visspec.models.targets.image_ar import Family, ImageAR
from visspec.types import Acceptance, Drafter, DrafterTraits, Order, Request, Sampling, State

KEPT = ("model", "processor", "drafter", "acceptance", "levels", "parts", "order", "_progress", "_home")  # by copies
OUTPUT_TYPES = ("pil", "np", "pt", "latent")


class ImagePipeline(Copied):
    """A loaded image model and how it is accelerated. The model is not changed.

    model, processor: as transformers loads them. drafter, acceptance, levels: as in `visspec.accelerate`; a call may
    name others. parts: what some families need beside the model (a codec, a style, a negative prompt). order: of
    decoding, raster by default; "zipar:window=4" drafts nothing, so the drafter is left out. Raises ValueError in one
    sentence where the parts do not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        processor: Any,
        drafter: str | Drafter | None = "jacobi",
        acceptance: str | Acceptance = "exact",
        levels: int | None = None,
        parts: dict[str, Any] | None = None,
        order: str | Order | None = None,
    ):
        self.model, self.processor, self.parts = model, processor, parts or {}
        self.drafter, self.acceptance, self.levels, self.order = drafter, acceptance, levels, order
        self.last_output = ImageOutput()  # finished images of the newest call, also when it was interrupted
        self.last_state: State | None = None
        self._progress: dict[str, Any] = {}
        self._home: torch.device | None = None
        self._lock, self._inside, self._calls = threading.RLock(), 0, Calls()
        self._renew()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in KEPT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*(state[name] for name in KEPT[:7]))
        self._progress, self._home = state["_progress"], state["_home"]

    @classmethod
    def from_pretrained(cls, where: str = "painter", *, device: str = "cpu", dtype: Any = "auto", **options):
        """A shipped name ("painter"), a folder or a hub id. Safetensors only; `options` as in the constructor, and
        `trust_remote_code` (off). dtype (diffusers' `torch_dtype` too): a name or a torch dtype.
        """
        from visspec.api.loading import load_image_model

        remote, dtype = options.pop("trust_remote_code", False), options.pop("torch_dtype", dtype)
        model, processor = load_image_model(where, device=device, dtype=dtype, trust_remote_code=remote)
        return cls(model, processor, **options)

    @property
    def device(self) -> torch.device:
        return self._home or self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def interrupt(self) -> bool:
        """Set by a callback: its own call ends and returns what is finished. Set in a thread that runs no call of this
        pipeline, it ends all that are under way. A call begins with False.
        """
        return any(job.interrupt for job in self._calls.meant())

    @interrupt.setter
    def interrupt(self, value: bool) -> None:
        for job in self._calls.meant():
            job.interrupt = bool(value)

    _interrupt = interrupt  # as callbacks written for diffusers spell it

    def save_pretrained(self, folder: str | Path, **options) -> None:
        """Write model and processor, for `from_pretrained`. Raises ValueError for parts that can't be written so."""
        for name, part in (("model", self.model), ("processor", self.processor)):
            if not hasattr(part, "save_pretrained"):
                raise ValueError(f"{name}: got {type(part).__name__}, expected a {name} of transformers to save")
        self.model.save_pretrained(folder, **options)
        self.processor.save_pretrained(folder)

    def to(self, *args, **kwargs) -> ImagePipeline:
        """Move or cast the model and what belongs to it; drafters and rules are built anew when they are next asked."""
        with self._lock:
            self._move(*args, **kwargs)
            self._renew()
        return self

    def _move(self, *args, **kwargs) -> None:
        with torch.inference_mode(False):  # weights that are moved in it could not be trained
            for part in (self.model, *self.parts.values()):
                if hasattr(part, "to"):
                    part.to(*args, **kwargs)

    def _renew(self) -> None:
        """Make again what is made of the weights: the family now, pairings when they are asked for."""
        with torch.inference_mode(False), torch.no_grad():
            self.family: Family = family_of(self.model, self.processor, **self.parts)
        self._made_of = (self.model.device, self.model.dtype)
        self._built: dict[Any, tuple] = {}

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """While any call runs, the weights are on their device, and what is made of them fits it and their dtype."""
        with self._lock:
            if self._home is not None and not self._inside:
                self._move(self._home)
            if self._made_of != (self.model.device, self.model.dtype):
                self._renew()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._home is not None and not self._inside:
                    self._move("cpu")

    def set_progress_bar_config(self, **options) -> None:
        """Arguments for tqdm, `disable=True` among them."""
        self._progress = options

    def enable_model_cpu_offload(self, device: str | torch.device = "cuda") -> None:
        """Keep the weights in main memory between calls, on `device` during them."""
        with self._lock:
            self._home = torch.device(device)
            if not self._inside:
                self._move("cpu")

    def __call__(
        self,
        prompt: str | Sequence[str],
        *,
        num_images_per_prompt: int = 1,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        height: int | None = None,
        width: int | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        seed: int | Sequence[int] | None = None,
        batch_size: int = 8,
        drafter: Any = ...,
        acceptance: str | Acceptance | None = None,
        order: str | Order | None = None,
        output_type: str = "pil",
        callback_on_step_end: Callable[[ImagePipeline, int, int, dict], dict | None] | None = None,
    ) -> ImageOutput:
        """Draw `num_images_per_prompt` images of every prompt.

        Defaults of guidance_scale, temperature, top_k and top_p are the model's own generation settings; temperature 0
        is greedy. seed: image i of the call gets seed + i, or its entry of a list; an image does not depend on the
        batch it is drawn in. callback_on_step_end(pipeline, round, tokens, {"state": ...}) runs after every pass of the
        target; setting `pipeline.interrupt` in it ends this call. KeyboardInterrupt leaves finished images in
        `last_output`, also those of the batch that it ends. output_type: pil; np (B, H, W, 3) and pt (B, 3, H, W) in
        [0, 1]; latent for codes alone.
        """
        out = self.last_output = ImageOutput()
        for part in self.stream(
            prompt, num_images_per_prompt=num_images_per_prompt, guidance_scale=guidance_scale,
            temperature=temperature, top_k=top_k, top_p=top_p, height=height, width=width, generator=generator,
            seed=seed, batch_size=batch_size, drafter=drafter, acceptance=acceptance, order=order,
            output_type=output_type, callback_on_step_end=callback_on_step_end,
        ):  # fmt: skip
            out.extend(part)
        join = {"np": np.stack, "pt": torch.stack}.get(output_type)
        if join and out.images:
            out.images = join(out.images)
        return out

    @torch.inference_mode()
    def stream(self, prompt, *, batch_size: int = 8, output_type: str = "pil", **options) -> Iterator[ImageOutput]:
        """The same, batch by batch, each as it is finished."""
        with self._in_place():
            job = self._job(prompt, batch_size=batch_size, output_type=output_type, **options)
            self._calls.jobs.append(job)
            try:
                with self.progress_bar(len(job.texts) * job.layout.positions) as bar:
                    for start in range(0, len(job.texts), batch_size):
                        job.thread = threading.get_ident()
                        part, stop = self._batch(job, slice(start, start + batch_size), bar)
                        yield part
                        if isinstance(stop, KeyboardInterrupt):
                            raise stop
                        if job.interrupt:
                            return
            finally:
                self._calls.jobs.remove(job)

    def progress_bar(self, total: int) -> tqdm:
        return tqdm(total=total, unit="tok", **({"leave": False} | self._progress))

    def _job(
        self, prompt, *, num_images_per_prompt=1, guidance_scale=None, temperature=None, top_k=None, top_p=None,
        height=None, width=None, generator=None, seed=None, batch_size, drafter=..., acceptance=None, order=None,
        output_type, callback_on_step_end=None,
    ) -> Job:  # fmt: skip
        """Everything that can be wrong is found here, before any pass."""
        texts = [prompt] if isinstance(prompt, str) else list(prompt) if isinstance(prompt, (list, tuple)) else []
        if not texts or not all(isinstance(t, str) for t in texts):
            raise ValueError(f"prompt: got {prompt!r}, expected a text or a list of texts")
        for name, count in (("num_images_per_prompt", num_images_per_prompt), ("batch_size", batch_size)):
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"{name}: got {count!r}, expected a whole number of at least 1")
        if callback_on_step_end is not None and not callable(callback_on_step_end):
            raise ValueError(f"callback_on_step_end: got {callback_on_step_end!r}, expected a function")
        if output_type not in OUTPUT_TYPES:
            raise ValueError(f"output_type: got {output_type!r}, expected one of {', '.join(OUTPUT_TYPES)}")
        sampling = self.sampling(guidance_scale, temperature, top_k, top_p)
        for name, side in (("height", height), ("width", width)):
            if side is not None and (not isinstance(side, int) or side < 1):
                raise ValueError(f"{name}: got {side!r}, expected a whole number of pixels")
        family = self.family
        layout = family.layout(height, width)
        if family.no_pixels and output_type != "latent":
            raise ValueError(f"output_type: got {output_type!r}, expected 'latent': {family.no_pixels}")
        longest = family.prompt(texts, sampling.guidance != 1.0, layout)
        family.check(longest, layout, sampling.guidance)
        if words := requests.unknown_words(self.processor, texts):
            expected = "expected words that the model was taught, no image will show others"
            warnings.warn(f"prompt: got {', '.join(words)}, {expected}", stacklevel=2)
        texts = [t for t in texts for _ in range(num_images_per_prompt)]
        seeds = image_seeds(generator, seed, len(texts))
        drafter = self._default_drafter(order) if drafter is ... else drafter
        pairing = self.pairing(
            drafter, acceptance if acceptance is not None else self.acceptance, self.order if order is None else order
        )
        return Job(texts, seeds, sampling, layout, family, pairing, output_type, callback_on_step_end)

    def sampling(self, guidance_scale, temperature, top_k, top_p) -> Sampling:
        """The call's settings, the model's own where it says nothing. Raises ValueError that names what is off."""
        own = getattr(self.model, "generation_config", None)
        usual = {"guidance_scale": self.family.default_guidance, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        given = {"guidance_scale": guidance_scale, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        values: dict[str, Any] = {}
        for name, value in given.items():
            theirs = None if name == "guidance_scale" else getattr(own, name, None)
            value = next((v for v in (value, theirs) if v is not None), usual[name])
            number = isinstance(value, (int, float)) and math.isfinite(value)
            if name == "top_p":
                right, wanted = number and 0 < value <= 1, "a number in (0, 1]"
            elif name == "top_k":
                right, wanted = isinstance(value, int) and value >= 0, "a whole number of 0 or more"
            else:
                right, wanted = number and value >= 0, "a number of 0 or more"
            if not right:
                raise ValueError(f"{name}: got {value}, expected {wanted}")
            values[name] = value
        return Sampling(guidance=float(values.pop("guidance_scale")), **values)

    def _default_drafter(self, order: Any) -> Any:
        """The pipeline's drafter, where the order of a call drafts."""
        found = zoo.order(self.order if order is None else order)
        return self.drafter if found is None or found.drafts else None

    def pairing(self, drafter, acceptance, order=None) -> Pairing:
        """A drafter, a rule and an order, by name or as they are, with the target; kept, so that a pace goes on
        learning.
        """
        asked = (drafter, acceptance, order)
        key = tuple(x if isinstance(x, str | None) else id(x) for x in asked)
        with self._lock:
            if key not in self._built:
                with torch.inference_mode(False), torch.no_grad():  # what is built in a call may be trained later
                    # kept with what was given: as long as that lives, its id is no other's
                    self._built[key] = (self._pairing(*asked), asked)
            return self._built[key][0]

    def _pairing(self, drafter, acceptance, order) -> Pairing:
        def make_target(traits: DrafterTraits) -> ImageAR:
            return ImageAR(self.family, features=bool(traits.feature_layers))

        rule, (found, name) = own_rule(acceptance), self._drafter(drafter)
        # a pace that reads clocks would make the draws of a rule with coins of its own depend on them
        adaptive = isinstance(rule, Acceptance) and not rule.traits.judges_draws
        return pair(
            found, name, rule, self.family, make_target, order=zoo.order(order), levels=self.levels, adaptive=adaptive
        )

    def _drafter(self, spec) -> tuple[Any, str]:
        """A drafter, by name or as it is, and its name."""
        if isinstance(spec, nn.Module):
            raise ValueError(
                f"drafter: got a {type(spec).__name__}, expected a drafter or its name; a smaller image model drafts as"
                " 'lowres:model=FOLDER'"
            )
        if not isinstance(spec, str) or spec.partition(":")[0] != "lowres":
            return zoo.drafter(spec, self.model)
        from visspec.api.loading import load_image_model
        from visspec.models.drafters.lowres import LowRes

        name, options = zoo.parse(spec)
        dtype = str(self.model.dtype).removeprefix("torch.")  # codebooks are compared
        sibling = load_image_model(options.pop("model", "painter-lowres"), device=str(self.device), dtype=dtype)
        if "upsample" in options:
            options["upsample"] = str(zoo.located(str(options["upsample"])))
        return zoo.make("drafter", name, LowRes, options, partial(LowRes, family_of(*sibling))), name

    def _batch(self, job: Job, rows: slice, bar: tqdm) -> tuple[ImageOutput, BaseException | None]:
        """The finished images of a batch, and what ended it before all were."""
        texts, seeds, pairing = job.texts[rows], job.seeds[rows], job.pairing
        prompt = job.family.prompt(texts, job.sampling.guidance != 1.0, job.layout)
        request = Request(
            inputs=prompt, prompt=prompt.ids, max_new_tokens=job.layout.positions, sampling=job.sampling,
            media={"texts": texts}, grid=job.layout.grid,
        )  # fmt: skip
        if bool((job.layout.fixed >= 0).any()):
            request.fixed = job.layout.fixed.to(self.device)
        if not job.sampling.greedy:
            request.generators = [torch.Generator(self.device).manual_seed(s) for s in seeds]
        request.on_round = watch = Watch(self, job, bar)
        stop: BaseException | None = None
        try:
            state = pairing.decode(request)
            if not pairing.order.raster:  # all tokens are final at once, at the end
                bar.update(sum(map(len, state.tokens)))
        except (Interrupted, KeyboardInterrupt) as ended:
            if watch.state is None:
                raise
            state, stop = pairing.finish(watch.state), ended
        self.last_state = state
        return self._output(job, state, texts, seeds), stop

    def _output(self, job: Job, state: State, texts: list[str], seeds: list[int]) -> ImageOutput:
        """Finished rows only: an interrupted batch keeps those that were complete."""
        whole = [job.layout.positions] * 2  # a KeyboardInterrupt may come between tokens and where they are from
        rows = zip(state.tokens, state.trace.origin)
        done = [b for b, row in enumerate(rows) if [len(part) for part in row] == whole]
        out = ImageOutput(prompts=[texts[b] for b in done], seeds=[seeds[b] for b in done])
        out.stats, out.traces = [Stats.of(state, job.pairing)], [state.trace]
        if not done:
            return out
        free = job.layout.free
        codes = torch.tensor([state.tokens[b] for b in done])[:, free]
        out.tokens = list(codes)
        out.maps = [origin_map(state.trace.origin[b], job.layout) for b in done]
        passes = [pass_numbers(o) for o in state.trace.origin] if job.pairing.order.raster else state.memory
        out.passes = [np.array(passes[b], np.int32)[free.numpy()].reshape(job.layout.grid) for b in done]
        if job.output_type == "latent":
            out.images = list(codes.view(len(done), *job.layout.grid))
            return out
        pixels = job.family.pixels(codes.to(self.model.device), job.layout).cpu()
        out.images = list(pixels) if job.output_type == "pt" else [p.permute(1, 2, 0).numpy() for p in pixels]
        if job.output_type == "pil":
            out.images = [Image.fromarray((255 * image).round().astype(np.uint8)) for image in out.images]
        return out


def image_seeds(generator, seed, count: int) -> list[int]:
    """One seed an image, as `requests.seeds`."""
    return requests.seeds(generator, seed, count, "an image")
