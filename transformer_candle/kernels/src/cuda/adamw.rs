//! `AdamW` on a GPU.

use super::KernelArg;
use super::launch::{Axis, Launch, ranges, variant};
use crate::optimizer_settings::AdamW;

/// The buffers that a step reads and writes.
#[derive(Clone, Copy)]
pub(crate) struct State {
    pub(crate) weight: KernelArg,
    pub(crate) low_bits: Option<KernelArg>,
    pub(crate) grad: KernelArg,
    pub(crate) moments: [KernelArg; 2],
    pub(crate) scalars: KernelArg,
}

/// See [`crate::adamw::step`].
pub(crate) fn step(state: &State, settings: &AdamW, weight_decay: f32, elements: usize) -> Vec<Launch> {
    let &AdamW { beta1, beta2, epsilon } = settings;
    let constants = [beta1, beta2, 1.0 - beta1, 1.0 - beta2, epsilon].map(|number| KernelArg::F32(number as f32));
    let part = |(start, length): (usize, usize)| {
        let flat = [Some(state.weight), state.low_bits, Some(state.grad)].into_iter().flatten().chain(state.moments);
        let mut values: Vec<KernelArg> = flat.map(|value| value.skip_elements(start)).collect();
        values.push(state.scalars);
        values.extend(constants);
        values.extend([KernelArg::F32(weight_decay), KernelArg::count(length)]);
        let grid = [Axis::Elements(length, "PIECE"), Axis::ONE, Axis::ONE];
        Launch::kernel("adamw_step", variant(state.weight.dtype()), grid, values)
    };
    ranges(elements).map(part).collect()
}
