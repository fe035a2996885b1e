"""Reads the sizes of the frames of an AV1 stream, for the AVIF reader. A decoder allocates memory by these sizes, not
by the sizes in the container.

The sequence header has the size of most frames. A frame header may have another size. The standard forbids a frame that
is larger than the sequence's size, but decoders accept such a frame. So this module reads the sequence header, and each
frame header up to the size. It must read or skip every field before the size, because the length of a field may depend
on earlier fields. Comments name the fields as the AV1 Bitstream Specification does (5.5 and 5.9).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from leasehold.pipelines.media.headers.bits import Bits
from leasehold.pipelines.media.refusals import corrupt_image

Size = tuple[int, int]  # width and height

MAX_UNITS = 100_000  # the most units (headers, tiles, metadata) of a file
#: The most frames in a sample; a frame that is shown again counts each time. Four are enough for a picture of four
#: layers. The bound is needed because a frame of a few bytes costs a decoder the time for its whole area.
MAX_FRAMES_PER_SAMPLE = 4

_SEQUENCE_HEADER, _FRAME_HEADERS = 1, {3, 6, 7}  # kinds of units. 3: header, 6: header and tiles, 7: copy of a header
_KEY, _INTRA_ONLY, _SWITCH = 0, 2, 3  # types of frames
_CHOOSE = 2  # a value of `screen_content` and `integer_vectors`: each frame header has a flag of its own
_REFERENCES, _SLOTS = 7, 8  # the frames that a frame refers to, and the slots in which a decoder keeps frames
_ALL_SLOTS = 0xFF  # one bit for each slot
_MAX_PROFILE = 2  # the greatest seq_profile of the standard
_FIRST_LEVEL_WITH_TIERS = 8  # from this seq_level_idx on, an operating point has the field seq_tier
_MAX_HEAD_BYTES = 512  # every field that is read is within these bytes, because 32 operating points take at most 356
_MAX_LENGTH_BYTES = 8  # of a number that `_leb128` reads


@dataclass(frozen=True, slots=True)
class _OperatingPoint:
    """A set of layers that a decoder may choose to decode. `layers`: one bit for each layer; 0: all layers.
    `has_model`: frame headers have a removal time for this point.
    """

    layers: int
    has_model: bool

    def has(self, temporal: int, spatial: int) -> bool:
        return not self.layers or bool(self.layers >> temporal & 1 and self.layers >> (spatial + 8) & 1)


@dataclass(frozen=True, slots=True)
class _Timing:
    """How many bits the times in frame headers have. This module skips the times. `has_model`: the stream has a decoder
    model. Only then can frame headers have removal times.
    """

    presentation_bits: int = 0
    removal_bits: int = 0
    buffer_delay_bits: int = 0
    has_model: bool = False


@dataclass(frozen=True, slots=True)
class _Sequence:
    """The fields of a sequence header on which the fields of frame headers depend.

    `is_reduced`: the stream is one still picture, whose headers leave out most fields. `size`: the size of each frame
    whose header has no size. `*_bits`: the lengths of fields in frame headers; 0: frame headers do not have the field.
    `screen_content`, `integer_vectors`: the flag for all frames, 0 or 1; _CHOOSE: each frame header has the flag.
    """

    is_reduced: bool
    timing: _Timing
    points: list[_OperatingPoint]
    width_bits: int
    height_bits: int
    size: Size
    id_bits: int
    id_delta_bits: int
    screen_content: int
    integer_vectors: int
    order_bits: int


@dataclass(frozen=True, slots=True)
class _Frame:
    """The first fields of a frame header. `is_resilient`: the header does not depend on earlier headers."""

    kind: int
    is_shown: bool
    is_resilient: bool

    @property
    def is_shown_key(self) -> bool:
        return self.kind == _KEY and self.is_shown

    @property
    def is_intra(self) -> bool:
        return self.kind in (_KEY, _INTRA_ONLY)


class Stream:
    """Reads the samples of one item or one track, in the order in which a decoder reads them. A sample is the coded
    bytes of a whole item, or of one frame of a track.

    `units`: the number of units so far. `frames`: the number of frames that a decoder decodes or shows again. `width`,
    `height`: the largest width and the largest height of these frames.
    """

    def __init__(self, max_units: int = MAX_UNITS) -> None:
        self.units = 0
        self.frames = 0
        self.width = 0
        self.height = 0
        self._samples = 0
        self._max_units = max_units
        self._sequence: _Sequence | None = None

    def read(self, sample: bytes) -> None:
        """Read the next sample. Raises Permanent `corrupt_image`. If the sample ends too early, reading beyond its end
        raises IndexError.
        """
        self._samples += 1
        for kind, layers, head in _units(sample):
            self.units += 1
            if self.units > self._max_units:
                raise corrupt_image("an item has too many units")
            if kind == _SEQUENCE_HEADER:
                self._sequence = _read_sequence(Bits(head))
            elif kind in _FRAME_HEADERS:
                self._read_frame(Bits(head), layers)
        if self.frames > MAX_FRAMES_PER_SAMPLE * self._samples:
            raise corrupt_image("an item has too many coded pictures")

    def _read_frame(self, bits: Bits, layers: int) -> None:
        if self._sequence is None:
            raise corrupt_image("a coded picture has no parameters")
        size = _frame_size(bits, self._sequence, layers, is_first=not self.frames)
        self.frames += 1
        if size is not None:
            self.width, self.height = max(self.width, size[0]), max(self.height, size[1])


def _units(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Each unit: its kind, the byte that names its layers, and the first bytes of its content."""
    position = 0
    while position < len(data):
        flags, layers = data[position], 0  # bit 2 of `flags`: a byte with layers follows; bit 1: a length follows
        position += 1
        if flags & 4:
            layers = data[position]
            position += 1
        length = len(data) - position
        if flags & 2:
            length, position = _leb128(data, position)
        end = position + length
        if end > len(data):
            raise corrupt_image("the file ends in the middle of its pixels")
        yield flags >> 3 & 15, layers, data[position : min(end, position + _MAX_HEAD_BYTES)]
        position = end


def _leb128(data: bytes, position: int) -> tuple[int, int]:
    """The number at the position, which has seven bits in each byte, and the position after the number."""
    value = 0
    for index in range(_MAX_LENGTH_BYTES):
        byte = data[position + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:  # noqa: PLR2004 - the highest bit: another byte follows
            return value, position + index + 1
    raise corrupt_image("a length in the file is invalid")


def _read_sequence(bits: Bits) -> _Sequence:
    """Reads sequence_header_obu(), up to the last field that frame headers depend on."""
    if bits.unsigned(3) > _MAX_PROFILE:
        raise corrupt_image("a parameter of the picture is invalid")
    bits.flag()  # still_picture
    is_reduced = bits.flag()
    timing, points = _Timing(), [_OperatingPoint(0, has_model=False)]
    if is_reduced:
        bits.unsigned(5)  # seq_level_idx
    else:
        timing = _read_timing(bits) if bits.flag() else timing  # timing_info_present_flag
        has_display_delay = bits.flag()
        point_count = bits.unsigned(5) + 1
        points = [_read_point(bits, timing, has_display_delay) for _ in range(point_count)]
    width_bits, height_bits = bits.unsigned(4) + 1, bits.unsigned(4) + 1
    size = bits.unsigned(width_bits) + 1, bits.unsigned(height_bits) + 1
    id_bits = id_delta_bits = 0
    if not is_reduced and bits.flag():  # frame_id_numbers_present_flag
        id_delta_bits = bits.unsigned(4) + 2
        id_bits = bits.unsigned(3) + id_delta_bits + 1
    bits.unsigned(3)  # use_128x128_superblock, enable_filter_intra, enable_intra_edge_filter
    screen_content, integer_vectors, order_bits = _CHOOSE, _CHOOSE, 0
    if not is_reduced:
        bits.unsigned(4)  # enable_interintra_compound, _masked_compound, _warped_motion, _dual_filter
        has_order = bits.flag()
        if has_order:
            bits.unsigned(2)  # enable_jnt_comp, enable_ref_frame_mvs
        screen_content = _CHOOSE if bits.flag() else bits.unsigned(1)
        if screen_content:
            integer_vectors = _CHOOSE if bits.flag() else bits.unsigned(1)
        order_bits = bits.unsigned(3) + 1 if has_order else 0
    return _Sequence(
        is_reduced, timing, points, width_bits, height_bits, size, id_bits, id_delta_bits, screen_content,
        integer_vectors, order_bits,
    )  # fmt: skip


def _read_timing(bits: Bits) -> _Timing:
    """Reads timing_info() and decoder_model_info()."""
    bits.unsigned(64)  # num_units_in_display_tick, time_scale
    has_equal_intervals = bits.flag()
    if has_equal_intervals:
        bits.exp_golomb()  # num_ticks_per_picture_minus_1
    if not bits.flag():  # decoder_model_info_present_flag
        return _Timing()
    buffer_delay_bits = bits.unsigned(5) + 1
    bits.unsigned(32)  # num_units_in_decoding_tick
    removal_bits, presentation_bits = bits.unsigned(5) + 1, bits.unsigned(5) + 1
    return _Timing(0 if has_equal_intervals else presentation_bits, removal_bits, buffer_delay_bits, has_model=True)


def _read_point(bits: Bits, timing: _Timing, has_display_delay: bool) -> _OperatingPoint:  # noqa: FBT001 - a field that `_read_sequence` has read
    layers = bits.unsigned(12)
    if bits.unsigned(5) >= _FIRST_LEVEL_WITH_TIERS:
        bits.flag()  # seq_tier
    has_model = timing.has_model and bits.flag()
    if has_model:
        bits.unsigned(2 * timing.buffer_delay_bits + 1)  # decoder_ and encoder_buffer_delay, low_delay_mode_flag
    if has_display_delay and bits.flag():
        bits.unsigned(4)  # initial_display_delay_minus_1
    return _OperatingPoint(layers, has_model)


def _frame_size(bits: Bits, sequence: _Sequence, layers: int, *, is_first: bool) -> Size | None:
    """Reads uncompressed_header(), up to the size. Returns None if the frame has the size of an earlier frame.

    The first frame must be a key frame that is shown, as the AVIF standard demands. This rule also makes it safe that
    this module reads each tile of a grid by itself, although a decoder reads all tiles as one stream. Because each tile
    begins with a key frame, no tile uses a frame of another tile.
    """
    is_repeated = not sequence.is_reduced and bits.flag()  # show_existing_frame
    # If an earlier frame is shown again, its header ends here. Then `frame` has made-up values. The code below reads
    # only its `is_shown_key`, which must be False.
    frame = _Frame(_SWITCH, is_shown=False, is_resilient=True) if is_repeated else _read_kind(bits, sequence)
    if is_first and not frame.is_shown_key:
        raise corrupt_image("its first coded picture depends on others")
    if is_repeated:
        return None
    has_own_size = _read_size_override(bits, sequence, frame)
    _skip_order(bits, sequence, frame, layers)
    _skip_slots(bits, sequence, frame)
    if not frame.is_intra:
        _skip_references(bits, sequence)
        if has_own_size and not frame.is_resilient and any(bits.flag() for _ in range(_REFERENCES)):  # found_ref
            return None
    if has_own_size:
        return bits.unsigned(sequence.width_bits) + 1, bits.unsigned(sequence.height_bits) + 1
    return sequence.size


def _read_kind(bits: Bits, sequence: _Sequence) -> _Frame:
    """The fields from frame_type to error_resilient_mode."""
    if sequence.is_reduced:
        return _Frame(_KEY, is_shown=True, is_resilient=True)
    kind, is_shown = bits.unsigned(2), bits.flag()
    if is_shown:
        bits.unsigned(sequence.timing.presentation_bits)
    else:
        bits.flag()  # showable_frame
    is_resilient = kind == _SWITCH or (kind == _KEY and is_shown) or bits.flag()
    return _Frame(kind, is_shown, is_resilient)


def _read_size_override(bits: Bits, sequence: _Sequence, frame: _Frame) -> bool:
    """Skip the fields before frame_size_override_flag. Returns this flag."""
    bits.flag()  # disable_cdf_update
    allows_screen_content = bits.unsigned(1) if sequence.screen_content == _CHOOSE else sequence.screen_content
    if allows_screen_content and sequence.integer_vectors == _CHOOSE:
        bits.flag()  # force_integer_mv
    bits.unsigned(sequence.id_bits)
    return frame.kind == _SWITCH or (not sequence.is_reduced and bits.flag())


def _skip_order(bits: Bits, sequence: _Sequence, frame: _Frame, layers: int) -> None:
    """Skip the frame's order number, primary_ref_frame and the removal times."""
    bits.unsigned(sequence.order_bits)
    if not frame.is_intra and not frame.is_resilient:
        bits.unsigned(3)  # primary_ref_frame
    if sequence.timing.has_model and bits.flag():  # buffer_removal_time_present_flag
        for point in sequence.points:
            if point.has_model and point.has(layers >> 5, layers >> 3 & 3):
                bits.unsigned(sequence.timing.removal_bits)


def _skip_slots(bits: Bits, sequence: _Sequence, frame: _Frame) -> None:
    """Skip refresh_frame_flags, and the order numbers of the frames in the slots."""
    refreshed = _ALL_SLOTS if frame.kind == _SWITCH or frame.is_shown_key else bits.unsigned(_SLOTS)
    if (refreshed != _ALL_SLOTS or not frame.is_intra) and frame.is_resilient:
        bits.unsigned(_SLOTS * sequence.order_bits)


def _skip_references(bits: Bits, sequence: _Sequence) -> None:
    is_short = sequence.order_bits > 0 and bits.flag()  # frame_refs_short_signaling
    if is_short:
        bits.unsigned(6)  # last_frame_idx, gold_frame_idx
    index_bits = 0 if is_short else 3  # ref_frame_idx of each reference; delta_frame_id_minus_1 follows it
    bits.unsigned(_REFERENCES * (index_bits + sequence.id_delta_bits))
