//! Query tiles: which query rows a tile has, which keys they attend to, and how rows are gathered and scattered.
//!
//! Grouped-query attention: the G = H / K query heads of a key/value head are interleaved, row r being head r % G of
//! the group at position r / G. A KV tile then serves the whole group at once, and keys and values are not repeated.

use super::super::disjoint::Disjoint;
use super::super::transpose::{SIDE, transpose as square};
use super::operand::{COLUMNS, LeftOperand};
use crate::buffer::{as_bytes, as_scalars};
use crate::heads::AttentionShape;
use crate::{DType, Element, HeadLayout};

/// Query rows of a tile, the columns of its matrices: 4 AVX-512 vectors. Scores, 64 x 64, are 16 KiB, a third of L1.
pub(super) const QUERY_TILE: usize = 64;
/// Keys of a KV tile: of head size 64, 16 KiB of keys and 16 KiB of values.
pub(super) const KV_TILE: usize = 64;

/// The sizes of one call of attention.
#[derive(Clone, Copy)]
pub(crate) struct CallShape {
    pub(crate) layout: HeadLayout,
    /// B, the number of sequences.
    pub(crate) batch: usize,
    /// T, the query positions of a sequence.
    pub(crate) length: usize,
    /// Keys of a sequence before its first query.
    pub(crate) past: usize,
}

impl CallShape {
    /// The shape of a call over whole sequences, without cached keys before them.
    pub(crate) fn whole(shape: &AttentionShape) -> Self {
        let &AttentionShape { heads, batch, sequence_length } = shape;
        Self { layout: heads, batch, length: sequence_length, past: 0 }
    }

    /// The number of (sequence, key/value head) pairs.
    pub(super) fn pairs(&self) -> usize {
        self.batch * self.layout.kv_heads
    }

    /// Query rows of a key/value head.
    fn rows(&self) -> usize {
        self.length * self.layout.group_size()
    }

    /// Tiles of a key/value head.
    pub(super) fn tiles(&self) -> usize {
        self.rows().div_ceil(QUERY_TILE)
    }

    /// A query tile of a (sequence, key/value head) pair.
    pub(super) fn tile(&self, pair: usize, index: usize) -> QueryTile {
        let first = index * QUERY_TILE;
        let rows = QUERY_TILE.min(self.rows() - first);
        let (sequence, kv_head) = (pair / self.layout.kv_heads, pair % self.layout.kv_heads);
        QueryTile { shape: *self, sequence, kv_head, first, rows }
    }

    /// The scale of the scores, 1 / sqrt(E).
    pub(super) fn scale(&self) -> f32 {
        (1.0 / (self.layout.head_size as f64).sqrt()) as f32
    }
}

/// Query rows `first..first + rows` of a key/value head of a sequence.
#[derive(Clone, Copy)]
pub(super) struct QueryTile {
    pub(super) shape: CallShape,
    pub(super) sequence: usize,
    pub(super) kv_head: usize,
    pub(super) first: usize,
    pub(super) rows: usize,
}

impl QueryTile {
    /// Index of the tile's (sequence, key/value head) pair.
    pub(super) fn pair(&self) -> usize {
        self.sequence * self.shape.layout.kv_heads + self.kv_head
    }

    /// The number of rows, padded to a multiple of [`COLUMNS`].
    pub(super) fn width(&self) -> usize {
        self.rows.next_multiple_of(COLUMNS)
    }

    /// The position of a row in its sequence, counted from the first query.
    fn position(&self, row: usize) -> usize {
        (self.first + row) / self.shape.layout.group_size()
    }

    /// The number of keys that the last row attends to, the most of any row.
    pub(super) fn keys(&self) -> usize {
        self.shape.past + self.position(self.rows - 1) + 1
    }

    /// How many of the first rows are before the key and do not attend to it.
    pub(super) fn masked_rows(&self, key: usize) -> usize {
        let rows = key.saturating_sub(self.shape.past) * self.shape.layout.group_size();
        rows.saturating_sub(self.first).min(self.rows)
    }

    /// The causal mask of the keys from `first` on.
    pub(super) fn causal_mask(&self, first: usize) -> CausalMask {
        CausalMask { tile: *self, first }
    }

    /// The first key that any row attends to, where the first row's document begins, rounded down to a KV tile.
    pub(super) fn first_key(&self, documents: Option<&[i32]>) -> usize {
        documents.map_or(0, |documents| self.document_start(0, documents) / KV_TILE * KV_TILE)
    }

    /// The first row whose document begins after the key: it and all later rows do not attend to the key.
    pub(super) fn document_end(&self, key: usize, documents: Option<&[i32]>) -> usize {
        let Some(documents) = documents else { return self.width() };
        // Documents begin in ascending order: a binary search.
        let (mut first, mut end) = (0, self.rows);
        while first < end {
            let middle = first.midpoint(end);
            if self.document_start(middle, documents) <= key {
                first = middle + 1;
            } else {
                end = middle;
            }
        }
        first
    }

    /// The position at which a row's document begins.
    fn document_start(&self, row: usize, documents: &[i32]) -> usize {
        let token = self.sequence * self.shape.length + self.position(row);
        documents[token].unsigned_abs() as usize
    }

    /// Returns the rows in order, counted up: a division for each would take as long as copying the row.
    pub(super) fn query_rows(&self) -> impl Iterator<Item = QueryRow> {
        let (tile, group) = (*self, self.shape.layout.group_size());
        let (mut position, mut member) = (tile.first / group, tile.first % group);
        (0..tile.rows).map(move |_| {
            let query_row = QueryRow { tile, position, head: tile.kv_head * group + member };
            member += 1;
            if member == group {
                (position, member) = (position + 1, 0);
            }
            query_row
        })
    }

    /// Writes the columns of `values_EL` (padded to multiples of [`SIDE`]), each times its row's factor, to the rows'
    /// heads among tokens of `token_width` elements.
    ///
    /// # Safety
    /// No other task accesses these heads.
    #[inline(always)]
    pub(super) unsafe fn scatter<E: Element>(
        &self,
        values_EL: &[f32],
        factor: impl Fn(usize) -> f32,
        target: &Disjoint<'_, E>,
        token_width: usize,
    ) {
        let (size, width) = (self.shape.layout.head_size, self.width());
        let mut transposed = [[0.0; SIDE]; SIDE];
        let mut query_rows = self.query_rows();
        for first in (0..self.rows).step_by(SIDE) {
            let rows = SIDE.min(self.rows - first);
            let mut offsets = [0; SIDE];
            for (offset, query_row) in offsets.iter_mut().zip(&mut query_rows) {
                *offset = query_row.offset(token_width);
            }
            let factors: [f32; SIDE] = std::array::from_fn(|i| factor(first + i.min(rows - 1)));
            for e in (0..size).step_by(SIDE) {
                square(&values_EL[e * width + first..], width, transposed.as_flattened_mut(), SIDE);
                for (i, row) in transposed[..rows].iter().enumerate() {
                    // SAFETY: as promised by the caller.
                    let target = unsafe { target.part(offsets[i] + e, SIDE.min(size - e)) };
                    scale_and_narrow(row, factors[i], target);
                }
            }
        }
    }

    /// Copies the rows' heads into rows of `padded` elements, times `factor`; the rest of `target` is zeroed.
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
        for (query_row, target) in self.query_rows().zip(rows.chunks_exact_mut(padded)) {
            let (head, padding) = target.split_at_mut(size);
            let source = &source[query_row.offset(token_width)..][..size];
            head.iter_mut().zip(source).for_each(|(target, source)| *target = source.widen() * factor);
            padding.fill(0.0);
        }
        empty.fill(0.0);
    }
}

/// The causal mask of a query tile for the keys from `first` on.
#[derive(Clone, Copy)]
pub(super) struct CausalMask {
    tile: QueryTile,
    first: usize,
}

impl CausalMask {
    /// How many of the first keys this row attends to.
    pub(super) fn visible_keys(&self, row: usize) -> usize {
        (self.tile.shape.past + self.tile.position(row) + 1).saturating_sub(self.first)
    }

    /// How many of the first rows attend neither to this key nor to a later one.
    pub(super) fn masked_rows(&self, key: usize) -> usize {
        self.tile.masked_rows(self.first + key)
    }
}

/// A row of a tile: its position and query head.
pub(super) struct QueryRow {
    tile: QueryTile,
    position: usize,
    head: usize,
}

impl QueryRow {
    /// Offset of the head's first element in rows of `token_width` elements: H * E (outputs) or P (packed QKV).
    pub(super) fn offset(&self, token_width: usize) -> usize {
        let QueryTile { sequence, shape, .. } = self.tile;
        (sequence * shape.length + self.position) * token_width + self.head * shape.layout.head_size
    }

    /// The row's index in `lse_BHT`.
    pub(super) fn lse_index(&self) -> usize {
        let QueryTile { sequence, shape, .. } = self.tile;
        (sequence * shape.layout.heads + self.head) * shape.length + self.position
    }
}

/// Keys or values: row i is the E elements from `first + i * stride` on.
#[derive(Clone, Copy)]
pub(super) struct KvRows<'a, E> {
    pub(super) values: &'a [E],
    pub(super) first: usize,
    pub(super) stride: usize,
}

impl<'a, E: Element> KvRows<'a, E> {
    /// Returns the keys and the values of a (sequence, key/value head) pair in packed QKV rows.
    pub(super) fn packed(qkv: &'a [E], shape: &CallShape, pair: usize) -> [Self; 2] {
        let (layout, stride) = (shape.layout, shape.layout.packed_width());
        let (sequence, kv_head) = (pair / layout.kv_heads, pair % layout.kv_heads);
        let token = sequence * shape.length * stride;
        [layout.heads, layout.heads + layout.kv_heads].map(|part| Self {
            values: qkv,
            first: token + (part + kv_head) * layout.head_size,
            stride,
        })
    }

    /// Returns the rows from `first` on, of `size` elements each: f32 in place, bf16 widened into `copies`, as many as
    /// it has room for.
    #[inline(always)]
    pub(super) fn operand<'b>(&self, first: usize, copies: &'b mut [f32], size: usize) -> LeftOperand<'b>
    where
        'a: 'b,
    {
        let rows = &self.values[self.first + first * self.stride..];
        if E::DTYPE == DType::F32 {
            return LeftOperand::rows(as_scalars(as_bytes(rows)), self.stride);
        }
        for (row, copy) in rows.chunks(self.stride).zip(copies.chunks_exact_mut(size)) {
            copy.iter_mut().zip(&row[..size]).for_each(|(copy, value)| *copy = value.widen());
        }
        LeftOperand::rows(copies, size)
    }
}

/// Transposes rows of `padded` elements into `target`. Both sizes are multiples of [`SIDE`].
#[inline(always)]
pub(super) fn transpose(source: &[f32], padded: usize, target: &mut [f32]) {
    let rows = source.len() / padded;
    for i in (0..rows).step_by(SIDE) {
        for j in (0..padded).step_by(SIDE) {
            square(&source[i * padded + j..], padded, &mut target[j * rows + i..], rows);
        }
    }
}

/// Writes `values * factor`, or as many of the first as `target` has room for.
#[inline(always)]
pub(super) fn scale_and_narrow<E: Element>(values: &[f32; SIDE], factor: f32, target: &mut [E]) {
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

/// Takes the first `count` elements of the scratch memory of a task, and leaves the rest.
#[allow(clippy::mut_mut)] // `scratch` is advanced
pub(super) fn take<'a>(scratch: &mut &'a mut [f32], count: usize) -> &'a mut [f32] {
    scratch.split_off_mut(..count).expect("workspace_elements covers every matrix of a task")
}
