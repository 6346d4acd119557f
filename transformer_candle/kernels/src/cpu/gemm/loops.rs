//! The loops around the micro-kernel, see the parent module.
//!
//! All threads pack a block of B together. Then each takes A blocks until none is left, packs them into memory of its
//! own unless they can be read in place, and multiplies them with the whole B block.

use std::ops::Range;

use pulp::Simd;
use rayon::prelude::*;

use super::blocks::{B_BLOCK_WORDS, Blocks};
use super::matrix::{Matrix, chunk, extent, steps};
use super::micro_kernel::{MAX_TILE, MicroKernel};
use super::operand::{PanelOperand, RowOperand};
use super::output::{Origin, OutputBlock, Start};
use super::pack::{Panels, pack, pack_columns, pack_rows};
use crate::cpu::disjoint::Disjoint;
use crate::cpu::schedule::{ForEachTask, run_tasks};
use crate::cpu::simd::Body;
use crate::cpu::transpose::SIDE;
use crate::{Element, WriteMode};

/// Column groups that a panel of A is divided into among threads: tasks of a quarter of a panel, so that the last ones
/// end together.
const COLUMN_GROUPS: usize = 4;
/// Words of the A blocks of all threads together: 4 panels of 14 packed rows for 16 threads; more threads have lower
/// blocks.
const A_BLOCKS_WORDS: usize = 896 * (1024 + 16);
/// Partial sums over the first blocks of K that are kept in f32 where `out` is bf16 and would round them: 4 MiB.
const PARTIAL_SUMS: usize = 1 << 20;
/// The largest NR of a micro-kernel; all others divide it.
const MAX_NR: usize = 32;
/// The most words of K in a panel of any micro-kernel, and so elements that all hold in one.
const MAX_KC_WORDS: usize = 1024;

/// The arguments of a GEMM.
pub(super) struct Gemm<'a, A, B, O> {
    pub(super) a: Matrix<'a, A>,
    pub(super) b: Matrix<'a, B>,
    pub(super) out: &'a mut [O],
    /// Elements from row to row of `out`.
    pub(super) stride: usize,
    pub(super) write_mode: WriteMode,
    pub(super) workspace: &'a mut [f32],
}

/// Elements of workspace for any micro-kernel: a B block, the threads' A blocks and partial sums, at most 3 million.
pub(crate) fn workspace_for(m: usize, n: usize, k: usize) -> usize {
    let b_block = B_BLOCK_WORDS.min(n.next_multiple_of(MAX_NR) * k.min(MAX_KC_WORDS).next_multiple_of(SIDE));
    b_block + A_BLOCKS_WORDS + partial_sums(m, n, k)
}

/// Partial sums that there is room for beside the B block.
fn partial_sums(m: usize, n: usize, k: usize) -> usize {
    if k > MAX_KC_WORDS { PARTIAL_SUMS.min(m * n) } else { 0 }
}

impl<A: Element, B: Element, O: Element> Gemm<'_, A, B, O> {
    /// Multiplies with the blocks of this processor.
    pub(super) fn multiply<T: MicroKernel>(self, kernel: T) {
        self.multiply_in(Blocks::of_this_processor(), kernel);
    }

    pub(super) fn multiply_in<T: MicroKernel>(self, blocks: Blocks, kernel: T) {
        let Self { a, b, out, stride, write_mode, workspace } = self;
        assert!(b.columns <= stride && out.len() >= extent(a.rows, b.columns, stride));
        if a.rows == 0 || b.columns == 0 || a.columns == 0 {
            // A sum over no elements is zero.
            let rows = out.chunks_mut(stride.max(1)).take(a.rows);
            if write_mode == WriteMode::Overwrite {
                rows.for_each(|row| row[..b.columns].fill(O::default()));
            }
            return;
        }
        // Squares of SIDE words are packed at a time: with a KC of whole squares only the last block has a partial one.
        let kc = even_step(a.columns, T::KC_WORDS * T::KR, SIDE * T::KR);
        let kc_words = words_of::<T>(kc.min(a.columns));
        let keeps_partials = kc < a.columns && size_of::<O>() < size_of::<f32>();
        // Of shorter panels the B block needs half of its room at most: the rest is for partial sums.
        let shares_room = keeps_partials && partial_sums(a.rows, b.columns, a.columns) == 0;
        let b_room = if shares_room { (workspace.len() - A_BLOCKS_WORDS) / 2 } else { blocks.b_words };
        let nc = even_step(b.columns, b_room / kc_words, T::NR);
        let (b_words, rest) = workspace.split_at_mut(nc * kc_words);
        let (a_blocks, partials) = rest.split_at_mut(A_BLOCKS_WORDS);
        let rows_that_fit = PARTIAL_SUMS.min(partials.len()) / nc.min(b.columns) / T::ROW_STEP * T::ROW_STEP;
        let partial_rows = if keeps_partials { rows_that_fit } else { a.rows };
        let (out, partials) = (Disjoint::new(out), Disjoint::new(partials));
        for rows in steps(a.rows, partial_rows) {
            // Loop 5.
            for columns in steps(b.columns, nc) {
                let origin = Origin { first: rows.start * stride + columns.start, stride };
                let partials_origin = Origin { first: 0, stride: columns.len() };
                // Loop 4, inside of loop 5, so that the partial sums of NC columns only are kept between blocks of K.
                for depth in steps(a.columns, kc) {
                    let transposed = b.submatrix(depth.clone(), columns.clone()).transposed();
                    let b_block = BBlock::new(kernel, blocks, transposed, b_words);
                    let a = a.submatrix(rows.clone(), depth.clone());
                    let macro_kernel = MacroKernel {
                        kernel,
                        a,
                        b_block,
                        columns: columns.len(),
                        words: words_of::<T>(a.columns),
                        blocks,
                    };
                    let previous = if depth.start > 0 { Start::Output } else { Start::Zero };
                    if !keeps_partials {
                        let start = if write_mode == WriteMode::Accumulate { Start::Output } else { previous };
                        macro_kernel.run(a_blocks, &OutputBlock { out: &out, origin, start });
                    } else if depth.end < b.rows {
                        macro_kernel
                            .run(a_blocks, &OutputBlock { out: &partials, origin: partials_origin, start: previous });
                    } else {
                        macro_kernel.run(
                            a_blocks,
                            &OutputBlock { out: &out, origin, start: Start::Partial(&partials, partials_origin) },
                        );
                    }
                }
            }
        }
    }
}

/// The words that hold this many elements of K, those of zeros at the end included.
fn words_of<T: MicroKernel>(elements: usize) -> usize {
    elements.div_ceil(T::KR).next_multiple_of(T::WORD_STEP)
}

/// The step, a multiple of `unit` and at most `limit`, that divides `size` into as few and as equal blocks as possible:
/// packing a short last block would cost as much per multiply-add as it saves in the others.
fn even_step(size: usize, limit: usize, unit: usize) -> usize {
    let blocks = size.div_ceil(limit / unit * unit).max(1);
    size.div_ceil(blocks).next_multiple_of(unit).max(unit)
}

/// A KC x NC block of B in panels of NR columns.
#[derive(Clone, Copy)]
struct BBlock<'a> {
    panels: PanelOperand<'a>,
    /// Words from one panel to the next.
    stride: usize,
}

impl<'a> BBlock<'a> {
    /// The block whose transpose is `b`, in place or packed into `panels`.
    fn new<T: MicroKernel, B: Element>(kernel: T, blocks: Blocks, b: Matrix<'a, B>, panels: &'a mut [f32]) -> Self {
        if b.rows.is_multiple_of(T::NR)
            && let Some(columns) = PanelOperand::in_place::<T, B>(b, blocks)
        {
            return Self { panels: columns, stride: T::NR };
        }
        let panels = PanelOperand { words: pack_b(kernel, b, panels), stride: T::NR };
        Self { panels, stride: words_of::<T>(b.columns) * T::NR }
    }
}

/// Packs the columns of a block of B, which are the rows of its transpose `b`.
fn pack_b<'a, T: MicroKernel, B: Element>(kernel: T, b: Matrix<'_, B>, panels: &'a mut [f32]) -> &'a [f32] {
    let words = words_of::<T>(b.columns);
    let panels = &mut panels[..b.rows.next_multiple_of(T::NR) * words];
    panels.par_chunks_exact_mut(T::NR * words).enumerate().for_each_task(|(index, panel)| {
        let columns = b.submatrix(chunk(index, T::NR, b.rows), 0..b.columns);
        kernel.simd().vectorize(Body(
            #[inline(always)]
            || pack::<T, B>(columns, panel),
        ));
    });
    panels
}

/// Rows of A times a B block: the loops over A blocks and tiles.
struct MacroKernel<'a, T, A> {
    kernel: T,
    a: Matrix<'a, A>,
    b_block: BBlock<'a>,
    /// Columns of the B block, at most NC.
    columns: usize,
    /// Words of K, at most KC.
    words: usize,
    blocks: Blocks,
}

impl<T: MicroKernel, A: Element> MacroKernel<'_, T, A> {
    /// Computes all tiles on all threads, each with its part of `a_blocks` to pack A into.
    fn run<O: Element>(&self, a_blocks: &mut [f32], target: &OutputBlock<'_, O>) {
        let threads = rayon::current_num_threads();
        let panels = Panels::new::<T>(self.a.rows, threads);
        let (tall, wide) = (panels.count, self.columns.div_ceil(T::NR));
        // Few panels are divided by columns as well, twice as many tasks as threads, so that every thread has work.
        // Where A has to be packed, each group packs its panel again: no more groups than that.
        let fewest_groups = if ABlock::is_in_place::<T, A>(self.a, self.blocks) { COLUMN_GROUPS } else { 1 };
        let groups = wide.min(fewest_groups.max((2 * threads).div_ceil(tall)));
        // MC: as many panels as fit into L2 and into this thread's part of the workspace.
        let in_l2 = self.blocks.a_factor * T::A_BLOCK_WORDS / (T::MR * self.words);
        let panels_that_fit = in_l2.min(A_BLOCKS_WORDS / T::ROW_STRIDE / T::MR / threads);
        let longest = panels_that_fit.clamp(1, self.blocks.a_factor * T::A_BLOCK_PANELS);
        let a_block_words = longest * T::MR * T::ROW_STRIDE;
        // Loop 3: a task is a column group of a panel; a thread takes several panels, an A block, at a time.
        run_tasks(tall * groups, groups, longest * groups, a_blocks, a_block_words, |share, a_block| {
            let panel_range = share.start / groups..share.end.div_ceil(groups);
            let (first, last) = (share.start % groups, (share.end - 1) % groups);
            let columns = first * wide / groups..(last + 1) * wide / groups;
            self.kernel.run(|| {
                self.kernel.simd().vectorize(Body(
                    #[inline(always)]
                    || self.multiply_block(panels, panel_range.clone(), columns.clone(), a_block, target),
                ));
            });
        });
    }

    /// Computes the tiles of these panels of A with these panels of B.
    #[inline(always)]
    fn multiply_block<O: Element>(
        &self,
        panels: Panels,
        panel_range: Range<usize>,
        columns: Range<usize>,
        a_block: &mut [f32],
        target: &OutputBlock<'_, O>,
    ) {
        let Self { kernel, a, b_block, words, blocks, .. } = *self;
        let all = panels.rows(panel_range.clone());
        let block_rows = panel_range.map(|number| {
            let rows = panels.rows(number..number + 1);
            rows.start - all.start..rows.end - all.start
        });
        let a_block = ABlock::new::<T, A>(a.submatrix(all.clone(), 0..a.columns), blocks, block_rows.clone(), a_block);
        let mut tile = AlignedTile([0.0; MAX_TILE]);
        // Loop 2: these panels of B stay in L2 while all panels of the A block pass.
        for group in steps(columns.len(), blocks.b_panels) {
            let group = columns.start + group.start..columns.start + group.end;
            // Loop 1.
            for (panel, rows) in block_rows.clone().enumerate() {
                let a = a_block.panel::<T>(panel, rows.clone());
                let rows = all.start + rows.start..all.start + rows.end;
                for column in group.clone() {
                    let b = b_block.panels.from(column * b_block.stride);
                    let columns = chunk(column, T::NR, self.columns);
                    target.prefetch(rows.clone(), columns.clone());
                    match a {
                        APanel::Rows(a) => kernel.multiply(rows.len(), words, a, b, &mut tile.0),
                        APanel::Columns(a) => kernel.multiply(rows.len(), words, a, b, &mut tile.0),
                    }
                    // SAFETY: every tile belongs to one thread.
                    unsafe { target.write_tile(kernel, &tile.0, rows.clone(), columns) };
                }
            }
        }
    }
}

/// A block of A, MC x KC.
#[derive(Clone, Copy)]
enum ABlock<'a> {
    /// Row-major, in place or packed.
    InRows(RowOperand<'a>),
    /// Column-major, in place.
    InColumns(PanelOperand<'a>),
    /// Column-major, packed into panels of MR rows.
    Packed(PanelOperand<'a>),
}

/// A panel of A.
#[derive(Clone, Copy)]
enum APanel<'a> {
    Rows(RowOperand<'a>),
    Columns(PanelOperand<'a>),
}

impl<'a> ABlock<'a> {
    /// Whether blocks of this operand need not be packed.
    fn is_in_place<T: MicroKernel, A: Element>(a: Matrix<'_, A>, blocks: Blocks) -> bool {
        if a.transposed {
            PanelOperand::in_place::<T, A>(a, blocks).is_some()
        } else {
            RowOperand::in_place::<T, A>(a).is_some()
        }
    }

    /// These rows of A, in place or packed into `packed`.
    #[inline(always)]
    fn new<T: MicroKernel, A: Element>(
        a: Matrix<'a, A>,
        blocks: Blocks,
        panels: impl Iterator<Item = Range<usize>> + Clone,
        packed: &'a mut [f32],
    ) -> Self {
        if !a.transposed || T::READS_ROWS {
            return Self::InRows(RowOperand::in_place::<T, A>(a).unwrap_or_else(|| pack_rows::<T, A>(a, packed)));
        }
        let whole = panels.clone().all(|rows| T::height(rows.len()) == rows.len());
        if whole && let Some(columns) = PanelOperand::in_place::<T, A>(a, blocks) {
            return Self::InColumns(columns);
        }
        pack_columns::<T, A>(a, panels, packed, T::MR, T::MR * T::ROW_STRIDE);
        Self::Packed(PanelOperand { words: packed, stride: T::MR })
    }

    /// Returns panel number `panel`, which has these rows.
    #[inline(always)]
    fn panel<T: MicroKernel>(self, panel: usize, rows: Range<usize>) -> APanel<'a> {
        match self {
            Self::InRows(a) => APanel::Rows(a.rows(rows)),
            Self::InColumns(a) => APanel::Columns(a.from(rows.start)),
            Self::Packed(a) => APanel::Columns(a.from(panel * T::MR * T::ROW_STRIDE)),
        }
    }
}

/// A tile of results, aligned for vectors.
#[repr(align(64))]
struct AlignedTile([f32; MAX_TILE]);
