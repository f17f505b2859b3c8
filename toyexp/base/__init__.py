"""General helpers, independent of the rest of toyexp. Plugins may import the names listed here."""

from typing import TYPE_CHECKING

from toyexp.base.lazy import lazy

if TYPE_CHECKING:
    from toyexp.base.drawing import require_drawing
    from toyexp.base.errors import RankFailed, UnknownCharacter, escape_controls
    from toyexp.base.files import (
        HEAD_SIZE,
        NOT_TEXT_HINTS,
        iter_files,
        not_text_error,
        open_file,
        read_file,
        read_text,
        require_directory,
        require_file,
        system_message,
        wrong_kind,
    )
    from toyexp.base.formatting import describe_parameters, format_count, format_duration, format_loss, pluralise
    from toyexp.base.lazy import numpy
    from toyexp.base.packages import broken_package, error_location, pause_collection
    from toyexp.base.random import generator, stream
    from toyexp.base.ranks import started_ranks
    from toyexp.base.run_plot import FAILED, Curves, Points, draw_curves
    from toyexp.base.signals import run_interruptibly
    from toyexp.base.terminal import (
        drop_output,
        has_colour,
        is_notebook,
        is_silent,
        print_error,
        print_line,
        print_note,
        show_status,
    )
    from toyexp.base.threads import (
        CORES_VARIABLE,
        MAX_THREADS,
        available_cores,
        check_threads,
        count_busy,
        crowding_note,
        machine_cores,
        reduce_spinning,
    )
    from toyexp.base.user_paths import cache_dir, is_private
    from toyexp.base.validators import (
        MAX_INT,
        is_integer,
        require_choice,
        require_float32,
        require_positive,
        require_range,
    )
    from toyexp.base.writing import dump_json, make_directory, open_for_writing, write_atomically, write_synced

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
