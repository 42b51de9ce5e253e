"""The live screen of `sidestep top`.

A thread looks, one look at a time, so keys are answered at once however many connections there are. Only the visible
ones are laid out. A provider that goes away leaves the last picture and a line that says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Final

from rich.text import Text
from textual import events, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Input, Static

from sidestep.cli.explain import explanation_text
from sidestep.cli.top_view import SORTS, head, headings, ordered, row
from sidestep.errors import Unavailable
from sidestep.observe.explain import Explainer, Query
from sidestep.observe.traffic import Activity, Sample, View, compare, take_sample

_STYLES: Final = {"promoted": "green", "attached": "cyan", "offered": "cyan", "pinned": "yellow"}
_INTERVALS_S: Final = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class ExplanationScreen(ModalScreen[None]):
    """Explanation of one connection."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q", "dismiss", "Back")]
    CSS = """
    ExplanationScreen { align: center middle; }
    #explanation { width: 90%; height: auto; max-height: 80%; border: round $primary; padding: 0 1; }
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="explanation"):
            yield Static(Text(self._text))
        yield Footer()


class TopApp(App[None]):
    """Connections, the busiest first."""

    CSS = """
    #head { height: auto; min-height: 6; }
    #rows { height: 1fr; }
    #filter { display: none; height: 1; border: none; padding: 0; }
    #filter.open { display: block; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("s", "sort", "Sort"),
        Binding("r", "reverse", "Reverse"),
        Binding("slash", "filter", "Filter"),
        Binding("enter", "explain", "Explain"),
        Binding("space", "pause", "Pause"),
        Binding("plus,equals_sign", "interval(1)", "Slower", show=False),
        Binding("minus", "interval(-1)", "Faster", show=False),
        Binding("escape", "clear", "Clear", show=False),
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home", "move(-1000000000)", show=False),
        Binding("end", "move(1000000000)", show=False),
    ]

    def __init__(self, socket_path: Path, *, interval_s: float, sort: str, wanted: str) -> None:
        super().__init__()
        self._socket_path = socket_path
        self._interval_s = interval_s
        self._sort, self._reverse, self._wanted = sort, False, wanted
        self._paused = self._looking = False
        self._sample: Sample | None = None
        self._view: View | None = None
        self._rows: list[Activity] = []
        self._cursor = self._first = 0  # indexes of the chosen row, and of the first one shown
        self._trouble = "looking"

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="rows")
        yield Input(self._wanted, id="filter", placeholder="part of a program, pid, address, state or reason")
        yield Footer()

    def on_mount(self) -> None:
        """Looks at once, and again after each interval."""
        self._timer = self.set_interval(self._interval_s, self._tick)
        self.query_one("#rows").can_focus = True
        self.query_one("#rows").focus()
        self._tick()

    # ---- looking ----

    def _tick(self) -> None:
        if not self._paused and not self._looking:
            self._looking = True
            self._look()

    @work(thread=True)
    def _look(self) -> None:
        try:
            found: Sample | Unavailable = take_sample(self._socket_path)
        except Unavailable as error:
            found = error
        self.call_from_thread(self._handle_look, found)

    def _handle_look(self, found: Sample | Unavailable) -> None:
        self._looking = False
        if not self.query("#head"):
            return  # the screen was being taken down
        if isinstance(found, Unavailable):
            self._trouble = f"{found.message}; looking on"
            self._sample = None  # counts from before and after a gap are not compared
        else:
            if self._sample is not None:
                self._view = compare(self._sample, found)
                self._trouble = ""
            else:
                self._trouble = "measuring"
                self.set_timer(min(0.25, self._interval_s), self._tick)  # a rate needs two looks
            self._sample = found
        self._show()

    # ---- showing ----

    def on_resize(self, _: events.Resize) -> None:
        self._show()

    def _show(self) -> None:
        width = self.size.width
        words = [self._trouble] if self._trouble else []
        words += ["PAUSED"] if self._paused else []
        words += [f"every {self._interval_s:g} s, by {self._sort}{' (reversed)' if self._reverse else ''}"]
        words += [f"filter {self._wanted!r}"] if self._wanted else []
        lines = head(self._view, str(self._socket_path), width) if self._view else []
        status = Text(", ".join(words)[:width] + "\n", style="bold red" if self._trouble or self._paused else "dim")
        self.query_one("#head", Static).update(status + Text("\n".join(lines)))
        chosen = self._key(self._rows[self._cursor]) if self._rows else None
        self._rows = ordered(self._view, self._sort, self._wanted, reverse=self._reverse) if self._view else []
        if chosen is not None and self._cursor:  # the choice stays with its connection; the first place with the place
            self._cursor = next((at for at, one in enumerate(self._rows) if self._key(one) == chosen), self._cursor)
        self._show_rows()

    def _show_rows(self) -> None:
        widget = self.query_one("#rows", Static)
        height = self._page
        self._cursor = max(0, min(self._cursor, len(self._rows) - 1))
        self._first = max(0, min(self._first, self._cursor, len(self._rows) - height), self._cursor - height + 1)
        width = self.size.width
        text = Text(headings(width).ljust(width) + "\n", style="reverse", no_wrap=True)
        for index in range(self._first, min(self._first + height, len(self._rows))):
            one = self._rows[index]
            chosen = "bold reverse" if index == self._cursor else _STYLES.get(one.connection.state, "")
            text.append(row(one, width) + "\n", style=chosen)
        widget.update(text)

    @staticmethod
    def _key(one: Activity) -> tuple[int, int]:
        return one.connection.pid, one.connection.born_ns

    @property
    def _page(self) -> int:
        return max(1, self.query_one("#rows").size.height - 1)

    # ---- keys ----

    def action_sort(self) -> None:
        names = list(SORTS)
        self._sort = names[(names.index(self._sort) + 1) % len(names)]
        self._show()

    def action_reverse(self) -> None:
        self._reverse = not self._reverse
        self._show()

    def action_pause(self) -> None:
        self._paused = not self._paused
        self._show()

    def action_interval(self, step: int) -> None:
        nearest = min(range(len(_INTERVALS_S)), key=lambda index: abs(_INTERVALS_S[index] - self._interval_s))
        self._interval_s = _INTERVALS_S[max(0, min(nearest + step, len(_INTERVALS_S) - 1))]
        self._timer.stop()
        self._timer = self.set_interval(self._interval_s, self._tick)
        self._show()

    def action_move(self, step: int) -> None:
        self._cursor += step
        self._show_rows()

    def action_page(self, pages: int) -> None:
        self.action_move(pages * self._page)

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.add_class("open")
        field.focus()

    def action_clear(self) -> None:
        self.query_one("#filter", Input).value = ""
        self._close_filter()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._wanted = event.value
        self._show()

    def on_input_submitted(self, _: Input.Submitted) -> None:
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter", Input).remove_class("open")
        self.query_one("#rows").focus()

    def action_explain(self) -> None:
        if self._rows:
            one = self._rows[self._cursor].connection
            self._explain(Query(pid=one.pid, fd=one.fd), f"{one.program}[{one.pid}] {one.local}: it has ended")

    @work(thread=True, exclusive=True)
    def _explain(self, wanted: Query, ended: str) -> None:
        found = [explanation_text(one) for one in Explainer(self._socket_path).explain(wanted)]
        self.call_from_thread(self.push_screen, ExplanationScreen("\n\n".join(found) or ended))
