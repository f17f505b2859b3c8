"""Python, files and words for people; no experiment in it. What plugins may use of it stands here."""

from typing import TYPE_CHECKING

from toyexp.base.lazy import lazy

if TYPE_CHECKING:
    from toyexp.base.drawing import (
        BLUE,
        GREY,
        INK,
        LABEL,
        RED,
        SMALL,
        VERMILLION,
        Sheet,
        logarithmic,
        own_style,
        require_drawing,
        thinned,
        whole_steps,
        write_ends,
    )
    from toyexp.base.errors import RankFailed, UnknownCharacter, for_terminal
    from toyexp.base.files import (
        NOT_TEXT,
        START,
        cause,
        misfit,
        not_text,
        open_file,
        read_file,
        read_text,
        require,
        require_folder,
    )
    from toyexp.base.formatting import count, counted, duration, parameters_of, smooth_loss
    from toyexp.base.packages import broken, place
    from toyexp.base.random import generator, stream
    from toyexp.base.ranks import started_ranks
    from toyexp.base.signals import interruptible
    from toyexp.base.terminal import complain, drop_output, in_notebook, is_silent, say, status
    from toyexp.base.threads import (
        CORES,
        MOST_THREADS,
        available_cores,
        calm_threads,
        check_threads,
        crowding,
        machine_cores,
        others_running,
    )
    from toyexp.base.user_paths import cache_dir, is_private
    from toyexp.base.validators import MOST, is_whole, require_float32, require_positive, require_within, require_words
    from toyexp.base.writing import dump_json, in_one_piece, make_folder, open_for_writing, write_synced

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
