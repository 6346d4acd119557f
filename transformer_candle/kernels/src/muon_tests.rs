use super::*;
use crate::cast::{join_master, split_master};
use crate::testing::*;
use crate::{DeviceKind, Error};

/// A step's scalars without clipping.
fn scalars(rate: f64) -> Vec<f64> {
    vec![rate, 1.0, 1.0, 1.0, 1.0]
}

const SETTINGS: Muon = Muon { momentum: 0.95, polynomials: Polynomials::Quintic };

/// `orthogonalize` of a batch, with scratch full of NaN.
fn orthogonalized(values: &[f64], sizes @ [b, m, n]: [usize; 3], dtype: DType, polynomials: Polynomials) -> Buffer {
    let mut update = buffer(values, &sizes, dtype);
    let nan = |shape: &[usize]| buffer(&vec![f64::NAN; shape.iter().product()], shape, dtype);
    let (mut other, s) = (nan(&sizes), m.min(n));
    let (mut gram, mut polynomial) = (nan(&[b, s, s]), nan(&[b, s, s]));
    let mut workspace = workspace(workspace_elements(sizes, DeviceKind::Cpu));
    let scratch = Scratch {
        other_BMN: &mut other,
        gram_BSS: &mut gram,
        polynomial_BSS: &mut polynomial,
        workspace: &mut workspace,
    };
    orthogonalize(&mut update, scratch, polynomials).unwrap();
    update
}

/// A matrix with its momentum and, if its weight is bf16, its low bits.
struct State {
    weight: Buffer,
    low_bits: Option<Buffer>,
    momentum: Buffer,
}

impl State {
    fn new(weight: &[f64], shape: &[usize], dtype: DType) -> Self {
        let (master, momentum) = (buffer(weight, shape, DType::F32), zeros(shape, DType::F32));
        if dtype == DType::F32 {
            return Self { weight: master, low_bits: None, momentum };
        }
        let (mut weight, mut low_bits) = (zeros(shape, DType::BF16), zeros(shape, DType::I16));
        split_master(&master, &mut weight, &mut low_bits).unwrap();
        Self { weight, low_bits: Some(low_bits), momentum }
    }

    fn step(&mut self, grad: &[f64], scalars: &[f64], settings: &Muon, decay: f64) {
        let (shape, dtype) = (self.weight.shape().to_vec(), self.weight.dtype());
        let (grad, scalars) = (buffer(grad, &shape, DType::F32), buffer(scalars, &[SCALARS], DType::F32));
        let mut update = zeros(&shape, dtype);
        accumulate_momentum(&mut self.momentum, &grad, &mut update, &scalars, settings).unwrap();
        let values: Vec<f64> = update.read_f32().unwrap().into_iter().map(f64::from).collect();
        let x = orthogonalized(&values, [1, shape[0], shape[1]], dtype, settings.polynomials).view(0, &shape).unwrap();
        step(&mut self.weight, self.low_bits.as_mut(), &x, &scalars, decay as f32).unwrap();
    }

    fn master(&self) -> Buffer {
        let Some(low_bits) = &self.low_bits else {
            return self.weight.clone();
        };
        let mut master = zeros(self.weight.shape(), DType::F32);
        join_master(&self.weight, low_bits, &mut master).unwrap();
        master
    }
}

#[test]
fn twenty_steps_match_pytorch() {
    let golden = Golden::load("muon");
    let [momentum, decay] = golden.values("hyper_2").try_into().unwrap();
    let settings = Muon { momentum, ..SETTINGS };
    let rates = golden.values("learning_rates_S");
    for matrix in ["wide", "tall", "square"] {
        let shape = golden.shape(&format!("{matrix}_start_MN")).to_vec();
        let elements: usize = shape.iter().product();
        let row = |name: &str, step: usize| {
            golden.values(&format!("{matrix}_{name}_SMN"))[step * elements..][..elements].to_vec()
        };
        let start = golden.values(&format!("{matrix}_start_MN"));
        let [mut exact, mut rounded] = [DType::F32, DType::BF16].map(|dtype| State::new(&start, &shape, dtype));
        for (index, &rate) in rates.iter().enumerate() {
            exact.step(&row("grads", index), &scalars(rate), &settings, decay);
            rounded.step(&row("grads", index), &scalars(rate), &settings, decay);
            assert_within(&exact.weight, &row("weights", index), 1e-5);
        }
        assert_within(&exact.momentum, &golden.values(&format!("{matrix}_momentum_MN")), 1e-5);
        let shipped = golden.values(&format!("bf16.{matrix}_weights_MN"));
        assert_within(&exact.weight, &shipped, 3e-3);
        assert_within(&rounded.master(), &shipped, 3e-3);
    }
}

#[test]
fn any_shape_and_either_type_match_the_reference() {
    for [b, m, n] in [[1, 1, 1], [2, 1, 70], [3, 70, 1], [2, 65, 130], [2, 130, 65], [1, 100, 100]] {
        for polynomials in [Polynomials::Quintic, Polynomials::PolarExpress] {
            let values = numbers(1, b * m * n);
            let exact = |matrix| reference::orthogonalize(matrix, [m, n], polynomials);
            let exact: Vec<f64> = values.chunks(m * n).flat_map(exact).collect();
            // The gain of small singular values, 8.3 * 4.1 * ... = 1007, is that of rounding errors as well.
            for (dtype, bound) in [(DType::F32, 2e-5), (DType::BF16, 6e-2)] {
                assert_within(&orthogonalized(&values, [b, m, n], dtype, polynomials), &exact, bound);
            }
        }
    }
}

#[test]
fn polar_express_leaves_singular_values_within_its_bound() {
    let composed = |polynomials: Polynomials, s: f64| {
        polynomials.coefficients().into_iter().fold(s, |s, coefficients| {
            let [a, b, c] = coefficients.map(f64::from);
            a * s + b * s.powi(3) + c * s.powi(5)
        })
    };
    let range = |polynomials| {
        let values = (0..=100_000).map(|step| composed(polynomials, 1e-3 + (1.0 - 1e-3) * f64::from(step) / 1e5));
        values.fold((f64::INFINITY, 0f64), |(low, high), value| (low.min(value), high.max(value)))
    };
    let (low, high) = range(Polynomials::PolarExpress);
    assert!(low > 0.86 && high < 1.14, "{low} {high}");
    assert!(range(Polynomials::Quintic).0 < low, "which the five equal quintics do not reach");
}

#[test]
fn a_matrix_of_zeros_stays_zero() {
    let zeros = orthogonalized(&[0.0; 60], [1, 6, 10], DType::BF16, Polynomials::Quintic);
    assert!(zeros.read_f32().unwrap().iter().all(|&x| x == 0.0));
}

#[test]
fn a_clipped_step_matches_the_reference() {
    let (shape, weight, grad) = ([20, 30], numbers(1, 600), numbers(2, 600));
    let mut scalars = scalars(0.02);
    scalars[CLIP_SCALE] = 0.25;
    let mut state = State::new(&weight, &shape, DType::F32);
    state.step(&grad, &scalars, &SETTINGS, 0.1);
    let (mut expected, mut momentum) = (weight, vec![0.0; 600]);
    reference::step((&mut expected, &mut momentum), &grad, shape, &scalars, &SETTINGS, 0.1);
    assert_within(&state.weight, &expected, 1e-5);
    assert_within(&state.momentum, &momentum, 1e-6);
}

#[test]
fn nothing_changes_where_the_step_must_not_be_applied() {
    for dtype in [DType::F32, DType::BF16] {
        let mut state = State::new(&numbers(1, 600), &[20, 30], dtype);
        state.step(&numbers(2, 600), &scalars(0.02), &SETTINGS, 0.1);
        let bits = |state: &State| [state.master(), state.momentum.clone()].map(|b| b.read::<f32>().unwrap());
        let before = bits(&state);
        let mut scalars = scalars(0.02);
        scalars[APPLY] = 0.0;
        state.step(&[f64::NAN; 600], &scalars, &SETTINGS, 0.1);
        assert_eq!(bits(&state), before);
    }
}

#[test]
fn an_update_of_two_axes_is_refused() {
    let [mut update, mut other, mut gram, mut polynomial] = [(); 4].map(|()| zeros(&[4, 4], DType::F32));
    let mut workspace = workspace(0);
    let scratch = Scratch {
        other_BMN: &mut other,
        gram_BSS: &mut gram,
        polynomial_BSS: &mut polynomial,
        workspace: &mut workspace,
    };
    let error = orthogonalize(&mut update, scratch, Polynomials::Quintic).unwrap_err();
    assert!(matches!(error, Error::Invalid { operation: "muon::orthogonalize", .. }), "{error}");
}
