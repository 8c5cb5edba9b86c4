"""`ImagePipeline`: accelerated autoregressive image generation with the conventions of diffusers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from tqdm import tqdm

from visspec import registry
from visspec.api import saving
from visspec.api.images import call as image_call
from visspec.api.images.call import ORIGINS as ORIGINS
from visspec.api.images.call import (
    ImageBatch,
    ImageJob,
    ImageOutput,
    ImageRequest,
    Interrupted,
    ProgressCallback,
    origin_map,
    pass_numbers,
)
from visspec.api.loading import load_diffusers, load_image_model
from visspec.api.text import requests
from visspec.api.text.accelerate import check_eager, own_rule
from visspec.io import included
from visspec.loop.draft_length import FixedLength
from visspec.loop.setup import DecodingSetup, build_setup
from visspec.loop.stats import Stats
from visspec.loop.visits import VisitOrder
from visspec.models.image_codes.family import Family, family_of
from visspec.models.lowres.drafter import LowRes
from visspec.registry import DrafterSpec
from visspec.types import Acceptance, DrafterTraits, Order, Processor, Sampling, State, Target

logger = logging.getLogger(__name__)


class ImagePipeline:
    """Accelerated image generation with a loaded model. The model is not changed.

    Args:
        model: A loaded model.
        processor: Its processor, as transformers loads it.
        drafter: As in `visspec.accelerate`. The default depends on the model: "jacobi", for vectors "none". Like
            `acceptance` and `order`, it can be overridden per call.
        acceptance: As in `visspec.accelerate`. The default is "exact", for vectors "coupled".
        levels: Maximum draft depth.
        parts: Additional parts of some families (a codec, a style, a negative prompt).
        order: Order of decoding, "raster" by default. For any-order models "halton" (default), "spread", "raster" or a
            list of places.
        compile: As in `visspec.accelerate`.
        graphs: As in `visspec.accelerate`.
        preset: A published method (`visspec list presets`), or a file that `visspec tune` wrote. Other arguments take
            precedence.
        debug: As in `visspec.accelerate`.
        batch_invariant: As in `visspec.accelerate`, in raster order. With vectors, maps or relaxed rules, images are
            drawn one at a time; maps take drafts in float32 only.

    Raises:
        ValueError: If the parts are incompatible.
    """

    model: Any
    _callback_tensor_inputs = image_call.TENSORS  # the attribute's name in diffusers

    def __init__(
        self,
        model: Any,
        processor: Processor | None,
        drafter: DrafterSpec | EllipsisType = ...,
        acceptance: str | Acceptance | None = None,
        levels: int | None = None,
        parts: dict[str, Any] | None = None,
        order: str | Order | None = None,
        compile: bool = False,
        graphs: bool | None = None,
        preset: str | Path | None = None,
        debug: bool = False,
        batch_invariant: bool = False,
    ):
        self.model, self.processor, self.parts = model, processor, parts or {}
        self.levels, self.order = levels, order
        self.compile, self.graphs, self.debug = compile, graphs, debug
        self.batch_invariant = batch_invariant
        check_eager(batch_invariant, compile, graphs)
        self.last_output = ImageOutput()  # finished images of the latest call, also if it was interrupted
        self.last_state: State | None = None
        self._progress: dict[str, Any] = {}
        self._home: torch.device | None = None
        self._lock, self._inside = threading.RLock(), 0
        self._jobs: list[ImageJob] = []  # of running calls
        self._renew()
        if preset is not None:
            published = registry.preset(preset, self.family.draws, model)
            drafter = published.drafter if isinstance(drafter, EllipsisType) else drafter
            acceptance, self.order = acceptance or published.acceptance, order or published.order
            self.levels = levels or published.levels
            if published.parts:
                self.parts = published.parts | self.parts
                self._renew()
        self.drafter: DrafterSpec = self.family.default_drafter if isinstance(drafter, EllipsisType) else drafter
        self.acceptance = acceptance if acceptance is not None else self.family.default_rule

    @classmethod
    def from_pretrained(
        cls, where: str | None = None, *, device: str = "auto", dtype: str | torch.dtype = "auto", **options
    ):
        """Load a model, with the settings and parts that `save_pretrained` wrote.

        Args:
            where: Folder, hub id or name of an included model. None is the included model that draws. Only safetensors
                are read.
            device: As in `visspec.api.loading.load`.
            dtype: Name or torch dtype; diffusers' `torch_dtype` works too.
            options: Arguments of the constructor, which override saved ones, and `trust_remote_code` (off).
        """
        remote, dtype = options.pop("trust_remote_code", False), options.pop("torch_dtype", dtype)
        where = where or included.image_model()
        if (preset := options.get("preset")) and not str(preset).endswith(".json"):
            registry.find("preset", preset)  # fails before the model is loaded
        options = saving.read(str(where), options)
        if (whole := load_diffusers(where, device=device, dtype=dtype)) is not None:
            options["parts"] = {"diffusion": whole} | (options.get("parts") or {})
            return cls(whole.vision_language_encoder, whole.processor, **options)
        model, processor = load_image_model(where, device=device, dtype=dtype, trust_remote_code=remote)
        return cls(model, processor, **options)

    @property
    def components(self) -> dict[str, Any]:
        """The constructor's arguments. `ImagePipeline(**pipe.components)` shares the weights."""
        names = signature(ImagePipeline).parameters  # the others have the values of the preset
        return {name: getattr(self, name) for name in names if name != "preset"}

    def with_parts(self, parts: dict[str, Any]) -> ImagePipeline:
        """Return a pipeline with the same weights and these parts in place of its own; itself if there are none.

        Args:
            parts: Parts by name, as `parts` of `from_pretrained`.
        """
        return type(self)(**self.components | {"parts": self.parts | parts}) if parts else self

    @property
    def device(self) -> torch.device:
        return self._home or self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def interrupt(self) -> bool:
        """Set this in a callback to end its call with the finished images, or elsewhere to end all running calls."""
        return any(job.interrupt for job in self._interruptible())

    @interrupt.setter
    def interrupt(self, value: bool) -> None:
        for job in self._interruptible():
            job.interrupt = bool(value)

    _interrupt = interrupt  # name that diffusers callbacks use

    def _interruptible(self) -> list[ImageJob]:
        jobs = list(self._jobs)
        return [job for job in jobs if job.thread == threading.get_ident()][-1:] or jobs

    def save_pretrained(self, folder: str | Path, **options) -> None:
        """Write model, processor, drafter, acceptance, levels and parts that are texts, for `from_pretrained`.

        Args:
            folder: The folder to write to.
            options: Options of the model's own `save_pretrained`.

        Raises:
            ValueError: If something can't be saved. Nothing is written then.
        """
        saving.save(folder, self.components, self.family, **options)

    def to(self, *args, **kwargs) -> ImagePipeline:
        """Move or cast the model and its parts like `nn.Module.to`. Drafters and rules are rebuilt at the next call.

        Args:
            args: Arguments of `nn.Module.to`: a device, a dtype or both.
            kwargs: The same by name.
        """
        with self._lock:
            self._move(*args, **kwargs)
            self._renew()
        return self

    def _move(self, *args, **kwargs) -> None:
        with torch.inference_mode(False):  # weights moved in inference mode could not be trained
            for part in (self.model, self.processor, *self.parts.values()):
                if hasattr(part, "to"):
                    part.to(*args, **kwargs)

    def _renew(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.family: Family = family_of(self.model, self.processor, **self.parts)
        self._made_of = (self.model.device, self.model.dtype)
        logger.debug("%s: made for %s, %s", self.family.name, *self._made_of)
        self._built: dict[Any, tuple] = {}

    @contextmanager
    def _in_place(self) -> Iterator[None]:
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
        """Set arguments of tqdm, such as `disable=True`.

        Args:
            options: Arguments of tqdm.
        """
        self._progress = options

    def enable_model_cpu_offload(self, device: str | torch.device = "cuda") -> None:
        """Keep the weights on the CPU, and on `device` only during calls.

        Args:
            device: Where calls run.
        """
        with self._lock:
            self._home = torch.device(device)
            if not self._inside:
                self._move("cpu")

    def __call__(self, prompt, *, return_dict: bool = True, **options: Any) -> ImageOutput | Any:
        """Generate images.

        Args:
            prompt: A text, or a list of texts.
            return_dict: False returns a tuple, (images,).
            negative_prompt: What guidance leads away from: one text or one for each prompt. "" is the empty prompt,
                None the model's own.
            num_images_per_prompt: Number of images for each prompt.
            guidance_scale, temperature, top_k, top_p: Sampling parameters, by default the model's; temperature 0 is
                greedy.
            seed: Image i uses seed + i, or its entry of a list. An image does not depend on its batch.
            output_type: "pil"; "np" (B, H, W, 3) or "pt" (B, 3, H, W) in [0, 1]; "latent" for codes only.
            preset: A published method or a file, as in the constructor. Other arguments take precedence.
            callback_on_step_end: Called as (pipeline, round, tokens, {"state": ...}) after every pass of the target.
            callback_on_step_end_tensor_inputs: Read-only tensors for the callback: "latents" (B, rows, columns) and
                "tokens" (B, rows * columns), -1 where there is no code yet.

        Returns:
            The images. After a KeyboardInterrupt the finished ones are in `last_output`.
        """
        request, out = ImageRequest(prompt, **options), ImageOutput()
        self.last_output = out
        for part in self._parts(request):
            out.extend(part)
        join: dict[str, Callable[..., Any]] = {"np": np.stack, "pt": torch.stack}
        if request.output_type in join and out.images:
            out.images = join[request.output_type](out.images)
        return out if return_dict else (out.images,)

    def stream(self, prompt: str | Sequence[str], **options: Any) -> Iterator[ImageOutput]:
        """Like `__call__`, but yield each batch when it is finished.

        Args:
            prompt, options: As in `__call__`.
        """
        yield from self._parts(ImageRequest(prompt, **options))

    def _parts(self, request: ImageRequest) -> Iterator[ImageOutput]:
        if request.preset is None:
            return self._drawn(request)
        preset = registry.preset(request.preset, self.family.draws, self.model)
        method: dict[str, Any] = {
            name: value
            for name, value in preset.method.items()
            if (own := getattr(request, name)) is None or own is ...
        }
        return self.with_parts(preset.parts)._drawn(replace(request, preset=None, **method))

    @torch.inference_mode()
    def _drawn(self, request: ImageRequest) -> Iterator[ImageOutput]:
        with self._in_place():
            job = self._job(request)
            self._jobs.append(job)
            try:
                with self.progress_bar(job.tokens) as bar:
                    while job.batches:
                        batch = job.batches.pop(0)  # frees its prompts when it is drawn
                        job.thread = threading.get_ident()
                        part, stop = self._batch(job, batch, bar)
                        yield part
                        if isinstance(stop, KeyboardInterrupt):
                            raise stop
                        if job.interrupt:
                            return
            finally:
                self._jobs.remove(job)

    def progress_bar(self, total: int) -> tqdm:
        """Return a progress bar of tqdm with the configuration of `set_progress_bar_config`.

        Args:
            total: Number of steps.
        """
        return tqdm(total=total, unit="tok", **({"leave": False} | self._progress))

    def _job(self, request: ImageRequest) -> ImageJob:
        family, texts = self.family, request.texts
        sampling = self.sampling(request.guidance_scale, request.temperature, request.top_k, request.top_p)
        layout = family.layout(request.height, request.width)
        if family.no_pixels and request.output_type != "latent":
            raise ValueError(f"output_type: got {request.output_type!r}, expected 'latent': {family.no_pixels}.")
        negatives = image_call.negatives_of(request.negative_prompt, texts, sampling.guidance, family)
        order = self.order if request.order is None else request.order
        drafter = self.drafter if request.drafter is ... else request.drafter
        setup = self.setup(drafter, self.acceptance if request.acceptance is None else request.acceptance, order)
        size, each = 1 if self._by_itself(setup.rule) else request.batch_size, request.each(texts)
        parts = [slice(start, start + size) for start in range(0, len(each), size)]
        of_each = None if negatives is None else request.each(negatives)
        prompts = [
            image_call.encode_prompts(family, each[part], of_each and of_each[part], layout, sampling.guidance)
            for part in parts
        ]
        image_call.warn_of_words(self.processor, prompt=texts, negative_prompt=negatives or [])
        seeds = requests.seeds(request.generator, request.seed, len(each), "an image")
        if isinstance(setup.order, VisitOrder):
            setup.order.places(*layout.grid)
        batches = [
            ImageBatch(each[part], of_each and of_each[part], prompt, seeds[part])
            for part, prompt in zip(parts, prompts)
        ]
        return ImageJob(request, sampling, layout, family, setup, batches)

    def _by_itself(self, rule: Acceptance) -> bool:
        """Return whether images are drawn one at a time: where batches may differ, and drafts change what is drawn."""
        return self.batch_invariant and (self.family.draws == "maps" or not rule.traits.keeps_tokens)

    def sampling(self, guidance_scale=None, temperature=None, top_k=None, top_p=None) -> Sampling:
        """Return sampling parameters, by default the model's. Raises ValueError for invalid values.

        Args:
            guidance_scale, temperature, top_k, top_p: As in `__call__`; None for the model's own.
        """
        own, usual = getattr(self.model, "generation_config", None), {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        values = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        for name, value in values.items():
            values[name] = next(v for v in (value, getattr(own, name, None), usual[name]) if v is not None)
        guidance = self.family.default_guidance if guidance_scale is None else guidance_scale
        sampling = Sampling(guidance=guidance, **values)
        self.family.check_sampling(sampling)
        return sampling

    def setup(self, drafter, acceptance, order=None) -> DecodingSetup:
        """Return the setup for a drafter, a rule and an order. It is cached, to reuse measured draft lengths.

        Args:
            drafter: A drafter or its name; None for the pipeline's own.
            acceptance: A rule or its name; None for the pipeline's own.
            order: An order, its name, or a list of places; None for the pipeline's own.
        """
        if not isinstance(order, str | Order | None):  # lists of places are compared by value
            order = tuple(order.tolist() if isinstance(order, torch.Tensor) else order)
        arguments = (drafter, acceptance, order)
        key = tuple(x if isinstance(x, str | tuple | None) else id(x) for x in arguments)
        with self._lock:
            if key not in self._built:
                with torch.inference_mode(False), torch.no_grad():  # modules built here may be trained later
                    # keeps the objects alive, so that their ids are not reused
                    self._built[key] = (self._build(*arguments), arguments)
            return self._built[key][0]

    def _build(self, drafter, acceptance, order) -> DecodingSetup:
        rule = own_rule(acceptance)
        # with adaptive lengths the samples of rules with their own random numbers would depend on timing
        length = FixedLength if rule.traits.judges_draws or self._by_itself(rule) else None

        def make_target(traits: DrafterTraits) -> Target:
            target = self.family.make_target(traits, self.compile)
            if self.batch_invariant:
                target.fix_widths()
            return target

        chosen_order = registry.order(self.family.default_order if order is None else order)
        setup = build_setup(
            *self._drafter(drafter),
            rule,
            self.family,
            make_target,
            order=chosen_order,
            levels=self.levels,
            length=length,
            compile=self.compile,
            graphs=False if self.batch_invariant else self.graphs,
            debug=self.debug,
        )
        if self.batch_invariant and not setup.order.raster:
            raise ValueError(f"batch_invariant: got the order {setup.order.name}, expected raster.")
        half = self.model.dtype in (torch.bfloat16, torch.float16)
        if self.batch_invariant and half and self.family.draws == "maps" and setup.drafter is not None:
            raise ValueError(
                f"batch_invariant: got drafts of maps in {self.model.dtype}, which change codes. Pass drafter=None."
            )
        return setup

    def _drafter(self, spec) -> tuple[Any, str]:
        if isinstance(spec, nn.Module):
            raise ValueError(
                f"drafter: got a {type(spec).__name__}, expected a drafter or its name; a smaller image model drafts as"
                " 'lowres:model=FOLDER'."
            )
        if not isinstance(spec, str) or spec.partition(":")[0] != "lowres":
            return registry.drafter(spec, self.model, self.family)
        name, options = registry.parse(spec)
        dtype = str(self.model.dtype).removeprefix("torch.")  # dtypes must match to compare codebooks
        own = options.pop("model", included.made_for("lowres", self.model))
        if own is None:
            raise ValueError(f"drafter: none is included for {spec!r} here, expected lowres:model=FOLDER.")
        sibling = load_image_model(own, device=str(self.device), dtype=dtype)
        if "upsample" in options:
            upsampler = str(options["upsample"])
            upsampler = included.made_for(upsampler, self.model) or upsampler
            options["upsample"] = str(registry.included_folder(upsampler))
        return registry.make("drafter", name, LowRes, options, partial(LowRes, family_of(*sibling))), name

    def _batch(self, job: ImageJob, batch: ImageBatch, bar: tqdm) -> tuple[ImageOutput, BaseException | None]:
        """Return the finished images of a batch, and the exception that ended it early, if any."""
        setup, request = job.setup, image_call.request_of(batch.prompt, job.layout, job.sampling, batch.seeds)
        request.media = {"texts": batch.texts, "negatives": batch.negatives}
        request.on_round = watch = ProgressCallback(self, job, bar)
        stop: BaseException | None = None
        try:
            state = setup.decode(request)
            if not setup.order.raster:  # all tokens become final at the end
                bar.update(sum(map(len, state.tokens)))
        except (Interrupted, KeyboardInterrupt) as ended:
            if watch.state is None:
                raise
            state, stop = setup.finish(watch.state), ended
        self.last_state = state
        return self._output(job, batch, state), stop

    def _output(self, job: ImageJob, batch: ImageBatch, state: State) -> ImageOutput:
        # a KeyboardInterrupt may occur between appending tokens and origins
        rows, whole = zip(state.tokens, state.trace.origin), state.request.max_new_tokens
        finished = [b for b, row in enumerate(rows) if all(len(part) == whole for part in row)]
        out = ImageOutput(prompts=[batch.texts[b] for b in finished], seeds=[batch.seeds[b] for b in finished])
        out.stats, out.traces = [Stats.of(state, job.setup)], [state.trace]
        if not finished:
            return out
        codes = job.layout.codes(torch.stack([state.output.values(b) for b in finished]).cpu())
        out.tokens = list(codes)
        origins = list(enumerate(state.trace.origin))
        out.maps = [origin_map(state.output.in_raster_order(*origins[b]), job.layout) for b in finished]
        raster = job.setup.order.raster
        passes = [state.output.in_raster_order(b, pass_numbers(o)) for b, o in origins] if raster else state.memory
        out.passes = [job.layout.placed(np.array(passes[b], np.int32)) for b in finished]
        kind = job.request.output_type
        if kind == "latent":
            out.images = list(job.layout.latents(codes))
            return out
        pixels = job.family.render(codes.to(self.model.device), job.layout, out.prompts, out.seeds).cpu()
        out.images = list(pixels) if kind == "pt" else [p.permute(1, 2, 0).numpy() for p in pixels]
        if kind == "pil":
            out.images = [Image.fromarray((255 * image).round().astype(np.uint8)) for image in out.images]
        return out
