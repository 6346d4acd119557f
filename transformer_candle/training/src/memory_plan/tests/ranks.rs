//! Plans for several ranks.

use model::ParameterLayout;

use super::*;

fn ranks(gpu: &str, ranks: usize) -> PlanRequest {
    PlanRequest { ranks: Some(ranks), ..request(gpu) }
}

fn on(run: &ResolvedRun, request: &PlanRequest) -> MemoryPlan {
    plan_on(run, request, &FakeMachine::default()).unwrap()
}

fn near(a: f64, b: f64) {
    assert!((a / b - 1.0).abs() < 1e-9, "{a} {b}");
}

/// Llama 3.2 3 B with the vocabulary of our presets.
fn three_billion() -> ResolvedRun {
    let mut run =
        run_of("1b", &["model.vocab_size=50000", "scheduler.total_steps=20000", "scheduler.warmup_steps=100"]);
    let model = &mut run.config.model;
    (model.hidden_size, model.intermediate_size, model.num_layers) = (3072, 8192, 28);
    (model.num_attention_heads, model.num_key_value_heads, model.head_dim) = (24, 8, Some(128));
    run
}

#[test]
fn a_plan_for_ranks_with_prices_reads_well() {
    let prices = PlanRequest { price_per_kwh: Some(0.3), price_per_hour: Some(0.5), ..ranks("rtx5090", 4) };
    let plan = on(&three_billion(), &prices);
    insta::assert_snapshot!(plan);
    assert!(plan.check().is_ok(), "3 B fit on four GPUs of 32 GB");
    let alone = on(&three_billion(), &request("rtx5090"));
    assert_eq!(alone.check().unwrap_err().exit_code(), 4, "and not on one");
}

#[test]
fn a_step_is_shared_and_the_exposed_exchange_is_added() {
    let run = run_of("rtx5090_1b", &["data.batch_size=4"]);
    let (one, four) = (on(&run, &request("rtx5090")), on(&run, &ranks("rtx5090", 4)));
    let (one, four) = (one.speed.unwrap(), four.speed.unwrap());
    let exchange = four.exchange.unwrap();
    let padding = 48 * 2048;
    near(exchange.bytes_per_rank, 0.75 * 6.0 * f64::from(1_318_832_128 + padding));
    for end in [0, 1] {
        near(exchange.seconds[end], exchange.bytes_per_rank / interconnect::PCIE_5.bytes_per_second[end]);
        let (all, exposed) = (exchange.seconds[end], exchange.exposed_seconds[end]);
        assert!(exposed > all / 3.0, "the weights follow the update");
        assert!(exposed < all * 2.0 / 3.0, "most gradients are exchanged beside the backward pass");
        let computing = four.step_seconds[end] - exposed;
        assert!((1.0..1.01).contains(&(computing / (one.step_seconds[end] / 4.0))), "the optimizer's shards differ");
        near(exchange.efficiency[end], one.step_seconds[end] / 4.0 / four.step_seconds[end]);
        near(four.mfu.unwrap()[end] / one.mfu.unwrap()[end], exchange.efficiency[end]);
    }
    let parts = four.parts.unwrap();
    near(parts.values().sum(), 1.0);
    near(parts["exchange"], exchange.exposed_seconds[1] / four.step_seconds[1]);
    assert_eq!(one.exchange, None);
}

#[test]
fn a_backward_pass_hides_no_more_than_it_takes() {
    let run = run_of("rtx5090_1b", &["data.batch_size=1"]);
    let slow = PlanRequest { interconnect: Some("1GB/s".parse().unwrap()), ..ranks("rtx5090", 4) };
    let speed = on(&run, &slow).speed.unwrap();
    let exchange = speed.exchange.unwrap();
    let computing = speed.step_seconds[1] - exchange.exposed_seconds[1];
    let hidden = exchange.seconds[1] - exchange.exposed_seconds[1];
    let backward = computing / 16.0 * 2.0 / 3.0;
    near(hidden, backward);
}

#[test]
fn virtual_shards_are_summed_before_the_exchange() {
    let run = run_of("rtx5090_1b", &["data.batch_size=4", "runtime.deterministic_reduction=4"]);
    let exchange = on(&run, &ranks("rtx5090", 4)).speed.unwrap().exchange.unwrap();
    near(exchange.exposed_seconds[0], exchange.seconds[0]);
    near(exchange.exposed_seconds[1], exchange.seconds[1]);
}

#[test]
fn every_gpu_pays_rent_and_electricity() {
    let run = run_of("rtx5090_1b", &["scheduler.total_steps=1000", "scheduler.warmup_steps=10"]);
    let request = PlanRequest { price_per_hour: Some(2.0), watts: Some(600.0), ..ranks("rtx5090", 4) };
    let plan = on(&run, &request);
    let (seconds, cost) = (plan.training_time.unwrap().seconds.unwrap(), plan.cost.unwrap());
    near(cost.rent.unwrap()[0], seconds[0] / 3600.0 * 4.0 * 2.0);
    near(cost.kilowatt_hours.unwrap()[1], seconds[1] / 3600.0 * 4.0 * 0.6);
}

#[test]
fn ranks_on_one_cpu_share_its_cores() {
    let run = run_of("smoke_cpu", &["data.sequences_per_step=32", "data.batch_size=8", "runtime.device=cpu"]);
    let request = PlanRequest { ranks: Some(2), times_operations: true, ..PlanRequest::default() };
    let two = on(&run, &request).speed.unwrap();
    let exchange = two.exchange.unwrap();
    near(two.step_seconds[1], CPU_STEP_SECONDS + exchange.seconds[1]);
    near(exchange.exposed_seconds[0], exchange.seconds[0]);
    near(exchange.exposed_seconds[1], exchange.seconds[1]);
    near(
        exchange.bytes_per_rank,
        0.5 * 8.0 * ParameterLayout::new(&model_shape(&run.config).unwrap()).elements() as f64,
    );
    near(exchange.efficiency[0], CPU_STEP_SECONDS / two.step_seconds[0]);
    let machines = PlanRequest { nodes: Some(2), interconnect: Some("10Gb/s".parse().unwrap()), ..request };
    let on_two_machines = on(&run, &machines).speed.unwrap();
    let computing = on_two_machines.step_seconds[1] - on_two_machines.exchange.unwrap().seconds[1];
    assert!((0.5..0.6).contains(&(computing / CPU_STEP_SECONDS)), "{computing}");
}

#[test]
fn ranks_machines_and_network_must_go_together() {
    let run = run_of("rtx5090_1b", &[]);
    let refused = |request: PlanRequest, words: &str| {
        let error = plan_on(&run, &request, &FakeMachine::default()).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(words), "{error}");
    };
    let interconnect = Some("400Gb/s".parse().unwrap());
    refused(PlanRequest { interconnect, ..request("h100") }, "add `--ranks N`");
    refused(PlanRequest { nodes: Some(3), interconnect, ..ranks("h100", 16) }, "3 machines");
    refused(PlanRequest { nodes: Some(2), ..ranks("h100", 16) }, "--interconnect 400Gb/s");
}

#[test]
fn more_machines_train_faster_and_less_efficiently() {
    let run = run_of("1b", &["model.vocab_size=32768"]);
    let of = |nodes: usize| {
        let interconnect = (nodes > 1).then(|| "400Gb/s".parse().unwrap());
        on(&run, &PlanRequest { nodes: Some(nodes), interconnect, ..ranks("h100", 8 * nodes) }).speed.unwrap()
    };
    let speeds = [1, 2, 4, 8].map(of);
    for pair in speeds.windows(2) {
        let [fewer, more] = pair else { unreachable!("windows of two") };
        assert!(more.tokens_per_second[1] > fewer.tokens_per_second[1]);
        let efficiency = |speed: &Speed| speed.exchange.as_ref().unwrap().efficiency[1];
        assert!(efficiency(more) < efficiency(fewer));
    }
}
