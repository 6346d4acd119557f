//! `AdamW` on a GPU.

use super::Value;
use super::request::{Blocks, Request, ranges, variant};
use crate::optimizer_settings::AdamW;

/// What a step reads and writes.
#[derive(Clone, Copy)]
pub(crate) struct State {
    pub(crate) weight: Value,
    pub(crate) low_bits: Option<Value>,
    pub(crate) grad: Value,
    pub(crate) moments: [Value; 2],
    pub(crate) scalars: Value,
}

/// See [`crate::adamw::step`].
pub(crate) fn step(state: &State, settings: &AdamW, weight_decay: f32, elements: usize) -> Vec<Request> {
    let &AdamW { beta1, beta2, epsilon } = settings;
    let constants = [beta1, beta2, 1.0 - beta1, 1.0 - beta2, epsilon].map(|number| Value::F32(number as f32));
    let part = |(start, length): (usize, usize)| {
        let flat = [Some(state.weight), state.low_bits, Some(state.grad)].into_iter().flatten().chain(state.moments);
        let mut values: Vec<Value> = flat.map(|value| value.skip_elements(start)).collect();
        values.push(state.scalars);
        values.extend(constants);
        values.extend([Value::F32(weight_decay), Value::count(length)]);
        let grid = [Blocks::Of(length, "PIECE"), Blocks::ONE, Blocks::ONE];
        Request::launch("adamw_step", variant(state.weight.dtype()), grid, values)
    };
    ranges(elements).map(part).collect()
}
