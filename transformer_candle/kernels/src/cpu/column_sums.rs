//! Sums over the rows of a matrix, added up in the same order at any number of threads: blocks of rows have a partial
//! sum each, which are then added in order.

use rayon::prelude::*;

use super::schedule::ForEachTask;

/// Maximum number of blocks of rows.
const BLOCKS: usize = 64;
/// Minimum number of rows of a block.
const BLOCK_ROWS: usize = 32;
/// Columns that one task sums over the blocks.
const COLUMNS: usize = 256;

/// Returns the rows per block for a matrix of `n` rows.
pub(super) fn rows_of_block(n: usize) -> usize {
    n.div_ceil(BLOCKS).max(BLOCK_ROWS)
}

/// Elements of the partial sums of `n` rows of `width`.
pub(crate) fn workspace_elements(n: usize, width: usize) -> usize {
    n.div_ceil(rows_of_block(n)) * width
}

/// Adds the rows of `partials` to `sums`.
pub(super) fn add_partials(partials: &[f32], sums: &mut [f32]) {
    let width = sums.len().max(1);
    sums.par_chunks_mut(COLUMNS).enumerate().for_each_task(|(piece, sums)| {
        for partial in partials.chunks_exact(width) {
            let partial = &partial[piece * COLUMNS..][..sums.len()];
            sums.iter_mut().zip(partial).for_each(|(sum, partial)| *sum += partial);
        }
    });
}
