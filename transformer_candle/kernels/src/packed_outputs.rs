//! The outputs of a module among those of several, which lie side by side.

use crate::Buffer;

/// The sizes of a module whose outputs are columns of wider rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedOutputs {
    pub(crate) n: usize,
    pub(crate) r: usize,
    pub(crate) o: usize,
    pub(crate) p: usize,
    pub(crate) first_column: usize,
}

impl PackedOutputs {
    /// As z [N, R], B [O, R] and y [N, P] have them; the callers then check every argument against these.
    pub(crate) fn new(z_NR: &Buffer, b_OR: &Buffer, y_NP: &Buffer, first_column: usize) -> Self {
        Self { n: size(z_NR, 0), r: size(b_OR, 1), o: size(b_OR, 0), p: size(y_NP, 1), first_column }
    }

    pub(crate) fn is_inside(&self) -> bool {
        self.first_column.checked_add(self.o).is_some_and(|end| end <= self.p)
    }

    pub(crate) fn problem(&self) -> String {
        let Self { o, p, first_column, .. } = self;
        format!("{o} columns from {first_column} on are not within rows of {p}")
    }
}

/// The size of an axis, 0 if there is no such axis.
pub(crate) fn size(buffer: &Buffer, axis: usize) -> usize {
    buffer.shape().get(axis).copied().unwrap_or(0)
}
