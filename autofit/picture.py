"""A figure that a notebook shows as it is: matplotlib's own is a line of text there until pyplot is imported."""

from io import BytesIO

from matplotlib.figure import Figure


class Picture(Figure):
    """A matplotlib Figure with a PNG of itself for notebooks."""

    def _repr_png_(self) -> bytes:
        self.savefig(held := BytesIO(), format="png")
        return held.getvalue()
