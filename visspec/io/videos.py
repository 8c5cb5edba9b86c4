"""Frames of video files, with PyAV (`visspec[video]`): an allow-list of containers, and a pixel limit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from visspec.io.images import MAX_PIXELS, open_image, read_image

SUFFIXES = (".mp4", ".mov", ".m4v", ".webm", ".mkv", ".avi")
CONTAINERS = "mov,matroska,avi"  # ffmpeg's demuxers, without playlists, which refer to other files
FRAMES = 8


@dataclass(frozen=True)
class Clip:
    """RGB frames from a whole video, and its metadata for video processors of transformers."""

    frames: list[Image.Image]
    metadata: dict[str, Any]


def open_media(
    source: str | Path | bytes | Image.Image, name: str = "", max_pixels: int = MAX_PIXELS, frames: int = FRAMES
) -> Image.Image | Clip:
    """Open an image or a video: a file (`images.open_image`, or `read_clip` by the file's name), the content of an
    image file (`images.read_image`), or an image that is open.
    """
    if isinstance(source, bytes):
        return read_image(source, name, max_pixels)
    if not isinstance(source, (str, Path)):
        return source
    is_video = Path(source).suffix.lower() in SUFFIXES
    return read_clip(source, frames, max_pixels) if is_video else open_image(source, max_pixels)


def read_clip(path: str | Path, frames: int = FRAMES, max_pixels: int = MAX_PIXELS) -> Clip:
    """Read the middle frames of `frames` equal parts of a video, or all of its frames if it has fewer. Raises
    FileNotFoundError, or ValueError for a broken file, another container, larger frames, or without PyAV.
    """
    try:
        import av

        with av.open(str(path), options={"format_whitelist": CONTAINERS, "protocol_whitelist": "file"}) as file:
            stream = file.streams.video[0]
            if stream.width * stream.height > max_pixels:
                size = f"{stream.width} x {stream.height} pixels"
                raise ValueError(f"{path} has {size}, more than the limit of {max_pixels}.")
            count = sum(packet.pts is not None for packet in file.demux(stream))  # some headers don't contain it
            indices = sorted({(2 * i + 1) * count // (2 * frames) for i in range(frames)})
            file.seek(0)
            frames_read = [frame for i, frame in zip(range(indices[-1] + 1), file.decode(stream)) if i in indices]
            images = [frame.to_image().convert("RGB").rotate(frame.rotation, expand=True) for frame in frames_read]
            fps, indices = float(stream.average_rate or 1), indices[: len(images)]
    except ImportError:
        raise ValueError(f"{path}: av is not installed. Run pip install 'visspec[video]'.") from None
    except FileNotFoundError:
        raise FileNotFoundError(f"video file {path} does not exist.") from None
    except (av.FFmpegError, OSError, IndexError) as error:
        raise ValueError(f"{path} is broken or not a video of {CONTAINERS} and cannot be decoded ({error}).") from None
    if not images:
        raise ValueError(f"{path} has no frame that can be decoded.")
    return Clip(images, {"total_num_frames": count, "fps": fps, "frames_indices": indices, "duration": count / fps})
