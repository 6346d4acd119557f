//! `AdamW` (Loshchilov & Hutter, arXiv:1711.05101) over flat buffers, by the formula of `torch.optim.AdamW`, in one
//! pass.
//!
//! With g = `CLIP_SCALE` * gradient and t the number of steps taken, this one included:
//! ```text
//! w *= 1 - LEARNING_RATE * weight_decay
//! m  = beta1 m + (1 - beta1) g
//! v  = beta2 v + (1 - beta2) g^2
//! w -= LEARNING_RATE / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + epsilon)
//! ```

use candle_core::DType;

use crate::access::{Access, Arguments};
use crate::cuda::{self, KernelArg};
use crate::{Buffer, Result, cpu};

pub use crate::optimizer_settings::{
    APPLY, AdamW, BIAS_CORRECTION1, BIAS_CORRECTION2, CLIP_SCALE, LEARNING_RATE, SCALARS,
};

/// The buffers that a step updates, all of one shape.
#[derive(Debug)]
pub struct AdamWState<'a> {
    /// The weights, F32, or BF16 beside their low bits.
    pub weight: &'a mut Buffer,
    /// The low 16 bits of the f32 master weights, I16 (see [`crate::cast`]): then the f32 value that the two make up is
    /// updated. None for F32 weights.
    pub low_bits: Option<&'a mut Buffer>,
    /// The first moments, F32.
    pub first_moment: &'a mut Buffer,
    /// The second moments, F32.
    pub second_moment: &'a mut Buffer,
}

/// Performs one step with an F32 gradient of the shape of the state.
pub fn step(state: AdamWState<'_>, grad: &Buffer, scalars: &Buffer, settings: &AdamW, weight_decay: f32) -> Result<()> {
    let AdamWState { weight, mut low_bits, first_moment, second_moment } = state;
    let shape = weight.shape();
    let master = if low_bits.is_some() { DType::BF16 } else { DType::F32 };
    let mut arguments = Arguments::new("adamw::step")
        .output("weight", weight, master, shape)
        .input("grad", grad, DType::F32, shape)
        .output("first_moment", first_moment, DType::F32, shape)
        .output("second_moment", second_moment, DType::F32, shape)
        .input("scalars", scalars, DType::F32, &[SCALARS]);
    if let Some(low_bits) = &low_bits {
        arguments = arguments.output("low_bits", low_bits, DType::I16, shape);
    }
    let elements = weight.elements();
    let state = cuda::adamw::State {
        weight: KernelArg::from(&*weight),
        low_bits: low_bits.as_deref().map(KernelArg::from),
        grad: KernelArg::from(grad),
        moments: [&*first_moment, &*second_moment].map(KernelArg::from),
        scalars: KernelArg::from(scalars),
    };
    let cpu = |access: &Access<'_>| {
        let scalars = scalars.slice::<f32>(access);
        if scalars[APPLY] == 0.0 {
            return Ok(());
        }
        let update = cpu::adamw::Update::new(scalars, settings, weight_decay);
        let moments = (first_moment.slice_mut(access), second_moment.slice_mut(access));
        let grad = grad.slice(access);
        match low_bits.as_mut() {
            None => cpu::adamw::step(weight.slice_mut(access), grad, moments, &update),
            Some(low_bits) => {
                let master = (weight.slice_mut(access), low_bits.slice_mut(access));
                cpu::adamw::step_split(master, grad, moments, &update);
            }
        }
        Ok(())
    };
    arguments.run(cpu, || cuda::adamw::step(&state, settings, weight_decay, elements))
}

/// The plain version.
pub mod reference {
    use super::{APPLY, AdamW, BIAS_CORRECTION1, BIAS_CORRECTION2, CLIP_SCALE, LEARNING_RATE};
    use crate::Real;

    /// Returns a weight and its two moments after one step.
    pub fn step<R: Real>(
        [weight, first, second]: [R; 3],
        gradient: R,
        scalars: &[R],
        settings: &AdamW,
        weight_decay: R,
    ) -> [R; 3] {
        if scalars[APPLY] == R::ZERO {
            return [weight, first, second];
        }
        let (beta1, beta2, rate) = (R::from_f64(settings.beta1), R::from_f64(settings.beta2), scalars[LEARNING_RATE]);
        let gradient = scalars[CLIP_SCALE] * gradient;
        let first = beta1 * first + (R::ONE - beta1) * gradient;
        let second = beta2 * second + (R::ONE - beta2) * gradient * gradient;
        let denominator = (second / scalars[BIAS_CORRECTION2]).sqrt() + R::from_f64(settings.epsilon);
        let decayed = weight * (R::ONE - rate * weight_decay);
        [decayed - rate / scalars[BIAS_CORRECTION1] * first / denominator, first, second]
    }
}

/// Calls for checks and benchmarks, of flat buffers.
pub mod cases {
    use super::{AdamW, AdamWState, SCALARS, step};
    use crate::cases::bounds::{EXACT, F32_POINTWISE};
    use crate::cases::{BufferContents, Case, CaseList, Inputs, Size};
    use crate::{DType, cast};

    const SETTINGS: AdamW = AdamW { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 };
    const WEIGHT_DECAY: f32 = 0.1;

    pub(crate) fn add(size: Size, _dtype: DType, cases: &mut CaseList) {
        for elements in size.elements() {
            cases.add(move |inputs| update(inputs, elements, true));
            cases.add(move |inputs| update(inputs, elements, false));
        }
    }

    /// [`step`], applied or not. With BF16 weights, the F32 master weights are compared, joined from weights and low
    /// bits.
    pub fn update(inputs: &mut Inputs, elements: usize, applied: bool) -> Case {
        let shape = [elements];
        let scalars = [0.01, 0.19, 0.0975, 0.5, if applied { 1.0 } else { 0.0 }];
        let bound = if applied { F32_POINTWISE } else { EXACT };
        let squares = inputs.random.numbers(elements).into_iter().map(|value| 0.1 * value * value);
        let second = BufferContents::from_numbers(squares.collect::<Vec<_>>(), DType::F32);
        let sizes = if applied { elements.to_string() } else { format!("{elements}, not applied") };
        let case = Case::new(inputs.name("adamw::step"), sizes)
            .in_given_types()
            .input("grad", &shape, inputs.f32(&shape))
            .updated("first_moment", &shape, inputs.f32(&shape), bound)
            .updated("second_moment", &shape, second, bound)
            .input("scalars", &[SCALARS], BufferContents::from_numbers(scalars, DType::F32));
        if inputs.dtype == DType::F32 {
            return case.updated("weight", &shape, inputs.f32(&shape), bound).call(
                |[grad, first_moment, second_moment, scalars, weight]| {
                    let state = AdamWState { weight, low_bits: None, first_moment, second_moment };
                    step(state, grad, scalars, &SETTINGS, WEIGHT_DECAY)
                },
            );
        }
        case.master_weight(inputs, &shape, bound)
            .bytes(elements * (4 + 12 + 12))
            .call(|[grad, first_moment, second_moment, scalars, weight, low_bits, _]| {
                let state = AdamWState { weight, low_bits: Some(low_bits), first_moment, second_moment };
                step(state, grad, scalars, &SETTINGS, WEIGHT_DECAY)
            })
            .observe(|[.., weight, low_bits, master]: [_; 7]| cast::join_master(weight, low_bits, master))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use crate::cast::{join_master, split_master};
    use crate::testing::*;

    const SETTINGS: AdamW = AdamW { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 };

    fn scalars(rate: f64, step: i32, settings: &AdamW) -> Vec<f64> {
        vec![rate, 1.0 - settings.beta1.powi(step), 1.0 - settings.beta2.powi(step), 1.0, 1.0]
    }

    /// The state of a test: weight (with or without low bits) and moments.
    struct State {
        weight: Buffer,
        low_bits: Option<Buffer>,
        moments: [Buffer; 2],
    }

    impl State {
        fn new(weight: &[f64], dtype: DType) -> Self {
            let shape = [weight.len()];
            let master = buffer(weight, &shape, DType::F32);
            let moments = [zeros(&shape, DType::F32), zeros(&shape, DType::F32)];
            if dtype == DType::F32 {
                return Self { weight: master, low_bits: None, moments };
            }
            let (mut weight, mut low_bits) = (zeros(&shape, DType::BF16), zeros(&shape, DType::I16));
            split_master(&master, &mut weight, &mut low_bits).unwrap();
            Self { weight, low_bits: Some(low_bits), moments }
        }

        fn step(&mut self, grad: &[f64], scalars: &[f64], settings: &AdamW, decay: f64) -> Result<()> {
            let grad = buffer(grad, &[grad.len()], DType::F32);
            let scalars = buffer(scalars, &[SCALARS], DType::F32);
            let Self { weight, low_bits, moments: [first, second] } = self;
            let low_bits = low_bits.as_mut();
            let state = AdamWState { weight, low_bits, first_moment: first, second_moment: second };
            step(state, &grad, &scalars, settings, decay as f32)
        }

        /// Returns the f32 weight: the weight itself, or joined with its low bits.
        fn master(&self) -> Buffer {
            let Some(low_bits) = &self.low_bits else {
                return self.weight.clone();
            };
            let mut master = zeros(self.weight.shape(), DType::F32);
            join_master(&self.weight, low_bits, &mut master).unwrap();
            master
        }

        fn bits(&self) -> Vec<u32> {
            let buffers = [&self.master(), &self.moments[0], &self.moments[1]];
            buffers.iter().flat_map(|buffer| buffer.read::<f32>().unwrap()).map(f32::to_bits).collect()
        }
    }

    #[test]
    fn six_steps_match_pytorch_in_f32_and_split() {
        let golden = Golden::load("adamw");
        let [beta1, beta2, epsilon, decay] = golden.values("hyper_4").try_into().unwrap();
        let settings = AdamW { beta1, beta2, epsilon };
        let size = golden.shape("weight_start")[0];
        let row = |name: &str, index: usize| golden.values(name)[index * size..][..size].to_vec();
        for dtype in [DType::F32, DType::BF16] {
            let mut state = State::new(&golden.values("weight_start"), dtype);
            for (index, rate) in golden.values("learning_rates_S").into_iter().enumerate() {
                let scalars = scalars(rate, index as i32 + 1, &settings);
                state.step(&row("grads_SX", index), &scalars, &settings, decay).unwrap();
                assert_within(&state.master(), &row("weights_SX", index), 1e-6);
                assert_within(&state.moments[0], &row("first_moments_SX", index), 1e-6);
                assert_within(&state.moments[1], &row("second_moments_SX", index), 1e-6);
            }
        }
    }

    #[test]
    fn a_split_weight_is_updated_like_an_f32_weight() {
        let size = 70_001;
        let [mut whole, mut split] = [DType::F32, DType::BF16].map(|dtype| State::new(&numbers(1, size), dtype));
        for index in 1..=3 {
            let grad = numbers(index as u64 + 1, size);
            for state in [&mut whole, &mut split] {
                state.step(&grad, &scalars(0.01, index, &SETTINGS), &SETTINGS, 0.1).unwrap();
            }
        }
        assert_eq!(whole.bits(), split.bits());
        assert!(whole.bits() != State::new(&numbers(1, size), DType::F32).bits());
    }

    #[test]
    fn a_clipped_step_matches_the_reference() {
        let (weight, grad) = (numbers(1, 1000), numbers(2, 1000));
        let mut scalars = scalars(0.02, 1, &SETTINGS);
        scalars[CLIP_SCALE] = 0.25;
        let mut state = State::new(&weight, DType::F32);
        state.step(&grad, &scalars, &SETTINGS, 0.1).unwrap();
        let expected = |(&w, &g): (&f64, &f64)| reference::step([w, 0.0, 0.0], g, &scalars, &SETTINGS, 0.1);
        let expected: Vec<[f64; 3]> = weight.iter().zip(&grad).map(expected).collect();
        for (index, ours) in [&state.weight, &state.moments[0], &state.moments[1]].into_iter().enumerate() {
            assert_within(ours, &expected.iter().map(|state| state[index]).collect::<Vec<_>>(), 1e-6);
        }
    }

    #[test]
    fn nothing_changes_where_the_step_may_not_be_applied() {
        for dtype in [DType::F32, DType::BF16] {
            let mut state = State::new(&numbers(1, 100), dtype);
            state.step(&numbers(2, 100), &scalars(0.1, 1, &SETTINGS), &SETTINGS, 0.1).unwrap();
            let bits_before = state.bits();
            let mut scalars = scalars(0.1, 2, &SETTINGS);
            scalars[APPLY] = 0.0;
            state.step(&[f64::NAN; 100], &scalars, &SETTINGS, 0.1).unwrap();
            assert_eq!(state.bits(), bits_before);
        }
    }

    #[test]
    fn a_bf16_weight_without_its_low_bits_is_refused() {
        let mut state = State::new(&numbers(1, 10), DType::BF16);
        state.low_bits = None;
        let error = state.step(&[0.0; 10], &[1.0; SCALARS], &SETTINGS, 0.0).unwrap_err();
        assert!(matches!(error, Error::DType { argument: "weight", .. }), "{error}");
    }

    #[test]
    fn moments_in_the_same_memory_are_refused() {
        let mut state = State::new(&numbers(1, 10), DType::F32);
        state.moments[1] = state.moments[0].clone();
        let error = state.step(&[0.0; 10], &[1.0; SCALARS], &SETTINGS, 0.0).unwrap_err();
        assert!(matches!(error, Error::Aliased { output: "second_moment", other: "first_moment", .. }), "{error}");
    }
}
