//! The chunked operation against its plain version, `PyTorch`, Candle's autograd and finite differences.

use candle_core::{Device, Tensor, Var};
use proptest::prelude::*;

use super::*;
use crate::testing::*;

/// A head with its input. Sizes are N, D, real and padded vocabulary.
struct Case {
    sizes: [usize; 4],
    hidden: Vec<f64>,
    weight: Vec<f64>,
    targets: Vec<i32>,
    scale: f64,
    z_loss: f64,
}

impl Case {
    fn new(sizes @ [n, d, vocab_size, v]: [usize; 4]) -> Self {
        let target = |n: usize| {
            if n % 5 == 2 { IGNORED_TARGET } else { (n * 7919 % vocab_size) as i32 }
        };
        let weight = numbers(2, v * d).into_iter().map(|value| 2.0 * value).collect();
        Self {
            sizes,
            hidden: numbers(1, n * d),
            weight,
            targets: (0..n).map(target).collect(),
            scale: 0.25,
            z_loss: 0.0,
        }
    }

    fn golden() -> Self {
        let golden = Golden::load("head_cross_entropy");
        let ([n, d], v) = ([golden.shape("hidden_ND")[0], golden.shape("hidden_ND")[1]], golden.shape("weight_VD")[0]);
        Self {
            sizes: [n, d, golden.integers("vocab_size")[0] as usize, v],
            hidden: golden.values("hidden_ND"),
            weight: golden.values("weight_VD"),
            targets: golden.integers("targets_N").iter().map(|&target| target as i32).collect(),
            scale: golden.values("scale")[0],
            z_loss: 0.0,
        }
    }

    /// loss, dhidden, dweight and every token's loss, with chunks of `rows` rows.
    fn run(&self, rows: usize, dtype: DType) -> Result<[Buffer; 4]> {
        self.run_in(&[rows, self.sizes[3]], dtype)
    }

    /// [`Case::run`] with logits of such a shape.
    fn run_in(&self, logits: &[usize; 2], dtype: DType) -> Result<[Buffer; 4]> {
        let [n, d, vocab_size, v] = self.sizes;
        let (hidden, weight) = (buffer(&self.hidden, &[n, d], dtype), buffer(&self.weight, &[v, d], dtype));
        let targets = integers(&self.targets);
        let mut space = workspace(workspace_elements(logits[0], d, v, DeviceKind::Cpu));
        let mut logits = workspace(logits.iter().product()).view(0, logits)?;
        let (mut loss, mut losses) = (zeros(&[1], DType::F32), zeros(&[n], DType::F32));
        let mut dhidden = zeros(&[n, d], dtype);
        // Every element is overwritten, the padding's rows too.
        let mut dweight = buffer(&vec![f64::NAN; v * d], &[v, d], DType::F32);
        let inputs = Inputs { hidden_ND: &hidden, weight_VD: &weight, targets_N: &targets, vocab_size };
        let (write_mode, z_loss) = (WriteMode::Overwrite, self.z_loss as f32);
        let gradients = Gradients { dhidden_ND: &mut dhidden, dweight_VD: Some(&mut dweight), write_mode, z_loss };
        let scale = buffer(&[self.scale], &[1], DType::F32);
        forward_backward(&inputs, &scale, &mut loss, gradients, &mut logits, &mut space)?;
        forward(&inputs, &mut losses, &mut logits, &mut space)?;
        Ok([loss, dhidden, dweight, losses])
    }

    /// The results of [`Case::run`] by the plain version in f64.
    fn expected(&self) -> [Vec<f64>; 4] {
        let [_, d, vocab_size, v] = self.sizes;
        let weight = &self.weight[..vocab_size * d];
        let losses = reference::losses(&self.hidden, weight, &self.targets, d);
        let (dhidden, mut dweight) =
            reference::gradients(&self.hidden, weight, &self.targets, d, [self.scale, self.z_loss]);
        dweight.resize(v * d, 0.0);
        [vec![self.scale * losses.iter().sum::<f64>()], dhidden, dweight, losses]
    }

    fn matches_reference(&self, rows: usize) {
        for dtype in [DType::F32, DType::BF16] {
            for (ours, exact) in self.run(rows, dtype).unwrap().iter().zip(self.expected()) {
                assert_near(ours, &exact);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    // With a single word the cross-entropy's gradient is exactly 0: what remains, the z-loss's, is below the rounding
    // of the softmax, which is 1.
    #[test]
    fn any_shape_matches_the_reference(
        n in 1usize..40, d in 1usize..30, vocab_size in 2usize..90, padding in 0usize..20, rows in 1usize..50,
        z_loss in prop::sample::select(vec![0.0, 1e-3]),
    ) {
        Case { z_loss, ..Case::new([n, d, vocab_size, vocab_size + padding]) }.matches_reference(rows);
    }
}

#[test]
fn a_vocabulary_of_several_blocks_matches_the_reference() {
    Case::new([70, 24, 1500, 1536]).matches_reference(32);
}

#[test]
fn how_far_apart_the_rows_of_logits_lie_changes_no_bit() {
    let v = 1024;
    let case = Case::new([70, 24, 1000, v]);
    for dtype in [DType::F32, DType::BF16] {
        let bits = |width: usize| case.run_in(&[32, width], dtype).unwrap().map(|buffer| buffer.read_f32().unwrap());
        for width in [v + 1, logits_width(v, DeviceKind::Cpu)] {
            assert_eq!(bits(v), bits(width));
        }
    }
    let error = case.run_in(&[32, v - 1], DType::F32).unwrap_err();
    assert_eq!(error.to_string(), "head_cross_entropy::forward_backward: rows of 1023 logits for 1024 words");
}

#[test]
fn f32_matches_pytorch() {
    let golden = Golden::load("head_cross_entropy");
    for rows in [1, 7, 26, 100] {
        let results = Case::golden().run(rows, DType::F32).unwrap();
        for (result, name) in results.iter().zip(["loss_1", "dhidden_ND", "dweight_VD", "losses_N"]) {
            assert_near(result, &golden.values(name));
        }
    }
}

#[test]
fn f32_matches_candle_autograd() {
    let mut case = Case { z_loss: 0.01, ..Case::new([12, 9, 31, 31]) };
    case.targets.iter_mut().filter(|target| **target < 0).for_each(|target| *target = 5);
    let [n, d, v, _] = case.sizes;
    let leaf = |values: &[f64], shape: [usize; 2]| {
        Var::from_tensor(&Tensor::from_vec(values.to_vec(), &shape, &Device::Cpu).unwrap()).unwrap()
    };
    let (hidden, weight) = (leaf(&case.hidden, [n, d]), leaf(&case.weight, [v, d]));
    let targets: Vec<u32> = case.targets.iter().map(|&target| target as u32).collect();
    let target_ids = Tensor::from_vec(targets, (n, 1), &Device::Cpu).unwrap();
    let logits = hidden.matmul(&weight.t().unwrap()).unwrap();
    let log_sum_exp = logits.log_sum_exp(1).unwrap();
    let losses = (&log_sum_exp - logits.gather(&target_ids, 1).unwrap().squeeze(1).unwrap()).unwrap();
    let loss = (losses.sum_all().unwrap() * case.scale).unwrap();
    let z_loss = (log_sum_exp.sqr().unwrap().sum_all().unwrap() * (case.scale * case.z_loss)).unwrap();
    let gradients = (&loss + z_loss).unwrap().backward().unwrap();
    let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f64>().unwrap();

    let [ours, dhidden, dweight, each] = case.run(5, DType::F32).unwrap();
    assert_near(&ours, &values(&loss));
    assert_near(&each, &values(&losses));
    assert_near(&dhidden, &values(gradients.get(&hidden).unwrap()));
    assert_near(&dweight, &values(gradients.get(&weight).unwrap()));
}

#[test]
fn the_references_gradients_are_the_slopes_of_its_losses() {
    let case = Case::new([4, 3, 7, 7]);
    let total = |hidden: &[f64], weight: &[f64]| {
        case.scale * reference::losses(hidden, weight, &case.targets, 3).iter().sum::<f64>()
    };
    let [_, dhidden, dweight, _] = case.expected();
    assert_same_gradient(&dhidden, &finite_differences(|hidden| total(hidden, &case.weight), &case.hidden));
    assert_same_gradient(&dweight, &finite_differences(|weight| total(&case.hidden, weight), &case.weight));
}

#[test]
fn loss_and_weight_gradient_accumulate() {
    let case = Case::new([6, 4, 11, 16]);
    let (hidden, weight) = (buffer(&case.hidden, &[6, 4], DType::F32), buffer(&case.weight, &[16, 4], DType::F32));
    let (mut loss, mut dhidden) = (integers(&[3f32]), zeros(&[6, 4], DType::F32));
    let mut dweight = buffer(&[0.5; 64], &[16, 4], DType::F32);
    let (mut logits, mut space) =
        (workspace(32).view(0, &[2, 16]).unwrap(), workspace(workspace_elements(2, 4, 16, DeviceKind::Cpu)));
    let targets = integers(&case.targets);
    let inputs = Inputs { hidden_ND: &hidden, weight_VD: &weight, targets_N: &targets, vocab_size: 11 };
    let write_mode = WriteMode::Accumulate;
    let gradients = Gradients { dhidden_ND: &mut dhidden, dweight_VD: Some(&mut dweight), write_mode, z_loss: 0.0 };
    let scale = buffer(&[0.25], &[1], DType::F32);
    forward_backward(&inputs, &scale, &mut loss, gradients, &mut logits, &mut space).unwrap();
    let [expected_loss, _, expected, _] = case.expected();
    assert_near(&loss, &[3.0 + expected_loss[0]]);
    assert_near(&dweight, &expected.iter().map(|value| value + 0.5).collect::<Vec<_>>());
}

#[test]
fn logits_of_any_size_give_a_finite_loss() {
    let mut case = Case::new([4, 2, 5, 5]);
    case.hidden.iter_mut().for_each(|value| *value *= 1e4);
    for (ours, exact) in case.run(4, DType::F32).unwrap().iter().zip(case.expected()) {
        assert_near(ours, &exact);
    }
}

#[test]
fn what_is_not_a_number_shows_in_the_loss() {
    let mut case = Case::new([4, 2, 5, 8]);
    case.hidden[0] = f64::NAN;
    let [loss, ..] = case.run(4, DType::F32).unwrap();
    assert!(loss.read::<f32>().unwrap()[0].is_nan());
}

#[test]
fn no_token_has_no_loss_and_no_gradient() {
    for buffer in Case::new([0, 3, 5, 8]).run(2, DType::F32).unwrap() {
        assert!(buffer.read::<f32>().unwrap().iter().all(|&value| value == 0.0));
    }
}

#[test]
fn a_batch_of_ignored_targets_has_no_loss_and_no_gradient() {
    let mut case = Case::new([7, 3, 5, 8]);
    case.targets.fill(IGNORED_TARGET);
    for buffer in case.run(2, DType::F32).unwrap() {
        assert!(buffer.read::<f32>().unwrap().iter().all(|&value| value == 0.0));
    }
}

#[test]
fn a_target_outside_of_the_vocabulary_is_named() {
    for wrong in [5, 8, -1, -99, i32::MIN, i32::MAX] {
        let mut case = Case::new([4, 3, 5, 8]);
        case.targets[1] = wrong;
        let error = case.run(2, DType::F32).unwrap_err();
        let expected = format!("head_cross_entropy::forward_backward: targets_N[1] = {wrong} is not within 0..5");
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn gradients_in_the_memory_of_the_values_are_refused() {
    let hidden = zeros(&[4, 3], DType::F32);
    let (weight, targets) = (zeros(&[8, 3], DType::F32), integers(&[0i32; 4]));
    let (mut loss, mut dweight) = (zeros(&[1], DType::F32), zeros(&[8, 3], DType::F32));
    let inputs = Inputs { hidden_ND: &hidden, weight_VD: &weight, targets_N: &targets, vocab_size: 8 };
    let (mut same, mut logits) = (hidden.clone(), zeros(&[2, 8], DType::F32));
    let write_mode = WriteMode::Overwrite;
    let gradients = Gradients { dhidden_ND: &mut same, dweight_VD: Some(&mut dweight), write_mode, z_loss: 0.0 };
    let (scale, mut space) =
        (buffer(&[1.0], &[1], DType::F32), workspace(workspace_elements(2, 3, 8, DeviceKind::Cpu)));
    let error = forward_backward(&inputs, &scale, &mut loss, gradients, &mut logits, &mut space).unwrap_err();
    assert!(matches!(error, Error::Aliased { output: "dhidden_ND", other: "hidden_ND", .. }), "{error}");
}
