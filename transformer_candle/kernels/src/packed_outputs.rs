//! The outputs of a module among those of several, which lie side by side.

use crate::Buffer;

/// The sizes of a module whose outputs are columns of wider rows: N tokens, rank R, O outputs in rows of P.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedOutputs {
    pub(crate) n: usize,
    pub(crate) r: usize,
    pub(crate) o: usize,
    pub(crate) p: usize,
    pub(crate) first_column: usize,
}

impl PackedOutputs {
    /// Takes the sizes from z [N, R], B [O, R] and y [N, P]; the callers then check every argument against these.
    pub(crate) fn new(z_NR: &Buffer, b_OR: &Buffer, y_NP: &Buffer, first_column: usize) -> Self {
        Self { n: z_NR.size(0), r: b_OR.size(1), o: b_OR.size(0), p: y_NP.size(1), first_column }
    }

    pub(crate) fn is_inside(&self) -> bool {
        self.first_column.checked_add(self.o).is_some_and(|end| end <= self.p)
    }

    pub(crate) fn problem(&self) -> String {
        let Self { o, p, first_column, .. } = self;
        format!("{o} columns from {first_column} on are not within rows of {p}")
    }
}
