"""Frames of video files, by PyAV (`visspec[video]`): allow-lists of containers and codecs, and a pixel limit."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from visspec.io.images import MAX_PIXELS, open_image

SUFFIXES = (".mp4", ".mov", ".m4v", ".webm", ".mkv", ".avi")
CONTAINERS = "mov,matroska,avi"  # ffmpeg's demuxers; playlists, which name other files, are not among them
CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mjpeg")
FRAMES = 8


@dataclass(frozen=True)
class Clip:
    """Frames from all over a video."""

    frames: list[Image.Image]  # RGB
    indices: list[int]  # of the frames among those of the video
    count: int  # frames of the video
    fps: float

    @property
    def metadata(self) -> dict[str, Any]:
        """As video processors of transformers take it."""
        found = {"total_num_frames": self.count, "fps": self.fps, "frames_indices": self.indices}
        return found | {"duration": self.count / self.fps}


def is_video(path: str | Path) -> bool:
    """Whether a file is taken for a video, by its name."""
    return Path(path).suffix.lower() in SUFFIXES


def open_media(path: str | Path, max_pixels: int = MAX_PIXELS, frames: int = FRAMES) -> Image.Image | Clip:
    """An image (`images.open_image`) or a video (`read_clip`), by the file's name."""
    return read_clip(path, frames, max_pixels) if is_video(path) else open_image(path, max_pixels)


def read_clip(path: str | Path, frames: int = FRAMES, max_pixels: int = MAX_PIXELS) -> Clip:
    """The middle frames of `frames` equal parts of a video, or all of one that has fewer frames.

    Raises FileNotFoundError if the file doesn't exist, and ValueError for one that is no video of these containers and
    codecs, is broken, has more than `max_pixels` pixels a frame, or without PyAV.
    """
    try:
        av = importlib.import_module("av")
    except ImportError:
        raise ValueError(f"{path}: av is not installed, expected it (pip install 'visspec[video]')") from None
    if not Path(path).exists():
        raise FileNotFoundError(f"there is no video file {path}")
    try:
        with av.open(str(path), options={"format_whitelist": CONTAINERS, "protocol_whitelist": "file"}) as file:
            return _read(file, str(path), frames, max_pixels)
    except (av.FFmpegError, OSError) as error:
        raise ValueError(f"{path} is broken or no video of {CONTAINERS} and cannot be decoded ({error})") from None


def _read(file, path: str, frames: int, max_pixels: int) -> Clip:
    """From an open container of PyAV."""
    if not file.streams.video:
        raise ValueError(f"{path} has no video stream")
    stream = file.streams.video[0]
    codec, size = stream.codec_context.codec.canonical_name, (stream.width, stream.height)
    if codec not in CODECS:
        raise ValueError(f"{path} is a video of {codec}, expected one of {', '.join(CODECS)}")
    if size[0] * size[1] > max_pixels:
        raise ValueError(f"{path} has {size[0]} x {size[1]} pixels, more than the limit of {max_pixels}")
    count = sum(packet.pts is not None for packet in file.demux(stream))
    indices = sorted({(2 * i + 1) * count // (2 * frames) for i in range(frames)})
    file.seek(0)
    found = []
    for index, frame in enumerate(file.decode(stream)):
        if index in indices:
            found.append(frame.to_image().convert("RGB").rotate(frame.rotation, expand=True))
        if len(found) == len(indices):
            break
    if not found:
        raise ValueError(f"{path} has no frame that can be decoded")
    return Clip(found, indices[: len(found)], count, float(stream.average_rate or 1))
