//! How a call is cut into tiles of query rows, and how rows get into a tile's scratch.
//!
//! The rows of one key/value head are its group's query rows, position by position: row r is query head r % G of the group
//! (G = H / K) at position r / G. So keys and values serve the whole group at once, and no head is repeated.

use super::super::disjoint::Disjoint;
use super::super::transpose::{SIDE, transpose as square};
use super::product::{COLUMNS, Left};
use crate::attention::AttentionShape;
use crate::buffer::{as_bytes, as_scalars};
use crate::{DType, Element, HeadLayout};

/// Query rows of a tile; in scratch they are the columns (lanes) of matrices.
pub(super) const LANES: usize = 64;
/// Keys that a tile meets at a time.
pub(super) const KEYS: usize = 64;

/// The sizes of a call.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) layout: HeadLayout,
    /// B, the number of sequences.
    pub(crate) batch: usize,
    /// T, the query positions of a sequence.
    pub(crate) length: usize,
    /// Keys of a sequence before its first query.
    pub(crate) past: usize,
}

impl Shape {
    /// Whole sequences, with nothing before them.
    pub(crate) fn whole(shape: &AttentionShape) -> Self {
        let &AttentionShape { heads, batch, sequence_length } = shape;
        Self { layout: heads, batch, length: sequence_length, past: 0 }
    }

    pub(super) fn pairs(&self) -> usize {
        self.batch * self.layout.kv_heads
    }

    /// Query rows of a key/value head.
    fn rows(&self) -> usize {
        self.length * self.layout.group_size()
    }

    /// Tiles of a key/value head.
    pub(super) fn tiles(&self) -> usize {
        self.rows().div_ceil(LANES)
    }

    /// A tile of a pair of sequence and key/value head.
    pub(super) fn tile(&self, pair: usize, index: usize) -> Tile {
        let first = index * LANES;
        let rows = LANES.min(self.rows() - first);
        let (sequence, kv_head) = (pair / self.layout.kv_heads, pair % self.layout.kv_heads);
        Tile { shape: *self, sequence, kv_head, first, rows }
    }

    pub(super) fn scale(&self) -> f32 {
        (1.0 / (self.layout.head_size as f64).sqrt()) as f32
    }
}

/// Query rows `first..first + rows` of a key/value head of a sequence.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub(super) shape: Shape,
    pub(super) sequence: usize,
    pub(super) kv_head: usize,
    pub(super) first: usize,
    pub(super) rows: usize,
}

impl Tile {
    /// The pair of sequence and key/value head that it belongs to.
    pub(super) fn pair(&self) -> usize {
        self.sequence * self.shape.layout.kv_heads + self.kv_head
    }

    /// The rows, rounded up to what a product's columns come in.
    pub(super) fn width(&self) -> usize {
        self.rows.next_multiple_of(COLUMNS)
    }

    fn position(&self, lane: usize) -> usize {
        (self.first + lane) / self.shape.layout.group_size()
    }

    /// Keys that the last row attends to.
    pub(super) fn keys(&self) -> usize {
        self.shape.past + self.position(self.rows - 1) + 1
    }

    /// The first so many rows lie before the key and do not attend to it.
    pub(super) fn blind(&self, key: usize) -> usize {
        let rows = key.saturating_sub(self.shape.past) * self.shape.layout.group_size();
        rows.saturating_sub(self.first).min(self.rows)
    }

    /// Where the rows stop to attend among the keys from `first` on.
    pub(super) fn edge(&self, first: usize) -> Edge {
        Edge { tile: *self, first }
    }

    /// The first key that the rows meet, rounded down to whole tiles: where the first row's document begins.
    pub(super) fn first_key(&self, documents: Option<&[i32]>) -> usize {
        documents.map_or(0, |documents| self.document(0, documents) / KEYS * KEYS)
    }

    /// The columns of scratch from this one on belong to documents that begin behind the key, and do not attend to it.
    pub(super) fn begun(&self, key: usize, documents: Option<&[i32]>) -> usize {
        let Some(documents) = documents else { return self.width() };
        let (mut begun, mut later) = (0, self.rows);
        while begun < later {
            let middle = begun.midpoint(later);
            if self.document(middle, documents) <= key {
                begun = middle + 1;
            } else {
                later = middle;
            }
        }
        begun
    }

    /// The position at which a row's document begins.
    fn document(&self, lane: usize, documents: &[i32]) -> usize {
        let token = self.sequence * self.shape.length + self.position(lane);
        documents[token].unsigned_abs() as usize
    }

    /// The rows' places in order, counted: a division for each would take as long as copying the row.
    pub(super) fn places(&self) -> impl Iterator<Item = Place> {
        let (tile, group) = (*self, self.shape.layout.group_size());
        let (mut position, mut member) = (tile.first / group, tile.first % group);
        (0..tile.rows).map(move |_| {
            let place = Place { tile, position, head: tile.kv_head * group + member };
            member += 1;
            if member == group {
                (position, member) = (position + 1, 0);
            }
            place
        })
    }

    /// Writes the columns of `values_EL` (padded to multiples of [`SIDE`]), each times its row's factor, to the rows' heads
    /// among tokens of `token_width` elements.
    ///
    /// # Safety
    /// No other task uses these heads.
    #[inline(always)]
    pub(super) unsafe fn scatter<E: Element>(
        &self,
        values_EL: &[f32],
        factor: impl Fn(usize) -> f32,
        target: &Disjoint<'_, E>,
        token_width: usize,
    ) {
        let (size, width) = (self.shape.layout.head_size, self.width());
        let mut turned = [[0.0; SIDE]; SIDE];
        let mut places = self.places();
        for first in (0..self.rows).step_by(SIDE) {
            let lanes = SIDE.min(self.rows - first);
            let mut offsets = [0; SIDE];
            for (offset, place) in offsets.iter_mut().zip(&mut places) {
                *offset = place.offset(token_width);
            }
            let factors: [f32; SIDE] = std::array::from_fn(|i| factor(first + i.min(lanes - 1)));
            for e in (0..size).step_by(SIDE) {
                square(&values_EL[e * width + first..], width, turned.as_flattened_mut(), SIDE);
                for (i, row) in turned[..lanes].iter().enumerate() {
                    // SAFETY: as promised by the caller.
                    let target = unsafe { target.part(offsets[i] + e, SIDE.min(size - e)) };
                    narrow_times(row, factors[i], target);
                }
            }
        }
    }

    /// Copies the rows' heads into rows of `padded` elements, times `factor`; what is left of `target` becomes zero.
    #[inline(always)]
    pub(super) fn gather<E: Element>(
        &self,
        source: &[E],
        token_width: usize,
        factor: f32,
        target: &mut [f32],
        padded: usize,
    ) {
        let size = self.shape.layout.head_size;
        let (rows, empty) = target.split_at_mut(self.rows * padded);
        for (place, target) in self.places().zip(rows.chunks_exact_mut(padded)) {
            let (head, padding) = target.split_at_mut(size);
            let source = &source[place.offset(token_width)..][..size];
            head.iter_mut().zip(source).for_each(|(target, source)| *target = source.widen() * factor);
            padding.fill(0.0);
        }
        empty.fill(0.0);
    }
}

/// The causal edge through a tile's lanes and the keys from one on: which of them meet.
#[derive(Clone, Copy)]
pub(super) struct Edge {
    tile: Tile,
    first: usize,
}

impl Edge {
    /// So many of the keys, the first ones, meet this lane or one before.
    pub(super) fn keys(&self, lane: usize) -> usize {
        (self.tile.shape.past + self.tile.position(lane) + 1).saturating_sub(self.first)
    }

    /// So many lanes, the first ones, meet neither this key nor one behind.
    pub(super) fn lanes(&self, key: usize) -> usize {
        self.tile.blind(self.first + key)
    }
}

/// The position and the query head of a tile's row.
pub(super) struct Place {
    tile: Tile,
    position: usize,
    head: usize,
}

impl Place {
    /// Where the head begins among tokens of `token_width` elements, H * E (outputs) or P (packed QKV).
    pub(super) fn offset(&self, token_width: usize) -> usize {
        let Tile { sequence, shape, .. } = self.tile;
        (sequence * shape.length + self.position) * token_width + self.head * shape.layout.head_size
    }

    /// Where the row lies in `lse_BHT`.
    pub(super) fn statistic(&self) -> usize {
        let Tile { sequence, shape, .. } = self.tile;
        (sequence * shape.layout.heads + self.head) * shape.length + self.position
    }
}

/// Rows of keys or values: row i is the E elements from `first + i * stride` on.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a, E> {
    pub(super) values: &'a [E],
    pub(super) first: usize,
    pub(super) stride: usize,
}

impl<'a, E: Element> Rows<'a, E> {
    /// The keys, and the values, of a pair of sequence and key/value head within packed rows.
    pub(super) fn packed(qkv: &'a [E], shape: &Shape, pair: usize) -> [Self; 2] {
        let (layout, stride) = (shape.layout, shape.layout.packed_width());
        let (sequence, kv_head) = (pair / layout.kv_heads, pair % layout.kv_heads);
        let token = sequence * shape.length * stride;
        [layout.heads, layout.heads + layout.kv_heads].map(|part| Self {
            values: qkv,
            first: token + (part + kv_head) * layout.head_size,
            stride,
        })
    }

    /// Rows of `size` elements from `first` on: those of f32 where they lie, others copied, as many as `copies` has room for.
    #[inline(always)]
    pub(super) fn left<'b>(&self, first: usize, copies: &'b mut [f32], size: usize) -> Left<'b>
    where
        'a: 'b,
    {
        let rows = &self.values[self.first + first * self.stride..];
        if E::DTYPE == DType::F32 {
            return Left::rows(as_scalars(as_bytes(rows)), self.stride);
        }
        for (row, copy) in rows.chunks(self.stride).zip(copies.chunks_exact_mut(size)) {
            copy.iter_mut().zip(&row[..size]).for_each(|(copy, value)| *copy = value.widen());
        }
        Left::rows(copies, size)
    }
}

/// The transpose of rows of `padded` elements. Both sizes are multiples of [`SIDE`].
#[inline(always)]
pub(super) fn transpose(source: &[f32], padded: usize, target: &mut [f32]) {
    let rows = source.len() / padded;
    for i in (0..rows).step_by(SIDE) {
        for j in (0..padded).step_by(SIDE) {
            square(&source[i * padded + j..], padded, &mut target[j * rows + i..], rows);
        }
    }
}

/// Where there are fewer, the first.
#[inline(always)]
pub(super) fn narrow_times<E: Element>(values: &[f32; SIDE], factor: f32, target: &mut [E]) {
    if let Some(target) = target.first_chunk_mut::<SIDE>() {
        for j in 0..SIDE {
            target[j] = E::narrow(values[j] * factor);
        }
    } else {
        for (j, target) in target.iter_mut().enumerate() {
            *target = E::narrow(values[j] * factor);
        }
    }
}

/// The first `count` elements, which `space` loses.
#[allow(clippy::mut_mut)] // the outer one moves on
pub(super) fn take<'a>(space: &mut &'a mut [f32], count: usize) -> &'a mut [f32] {
    space.split_off_mut(..count).expect("workspace_elements covers every matrix of a task")
}
