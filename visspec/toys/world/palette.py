"""Names and colours of the shape world: pure constants, no dependency."""

CLASSES = ("circle", "square", "triangle", "diamond", "cross", "star", "ring", "bar")

# GenEval's ten colour words with fixed sRGB values, chosen to differ from each other and from the canvas.
COLOURS = {
    "red": (214, 32, 32),
    "orange": (245, 130, 16),
    "yellow": (246, 222, 40),
    "green": (30, 140, 52),
    "blue": (32, 72, 210),
    "purple": (122, 36, 158),
    "pink": (250, 130, 186),
    "brown": (112, 66, 28),
    "black": (16, 16, 16),
    "white": (250, 250, 250),
}

CANVAS = (153, 153, 153)  # GenEval's neutral grey, the mean of every ground

GROUNDS = ("plain", "speckled", "striped", "cloudy")

SIZES = ("small", "large")
