//! Saved state is restored bitwise, and `transformers` reads it.

use super::*;

#[test]
fn every_bit_comes_back() {
    for precision in [Precision::Fp32, Precision::Bf16] {
        let folder = tempfile::tempdir().unwrap();
        let tiny = Tiny::at(precision, 5);
        let checkpoint = tiny.save(folder.path(), &state_at(5));
        let mut read = Tiny::zeros(precision);
        read.restore(&checkpoint).unwrap();
        assert_eq!(read.bits(), tiny.bits());
        assert_eq!(load_state(&checkpoint).unwrap(), state_at(5));
        let model = Checkpoint::open(&checkpoint).unwrap().model().unwrap();
        assert_eq!((model.precision, model.stop_tokens), (precision, vec![0]));
        assert_eq!(model.shape, tiny.shape);
    }
}

#[test]
fn the_directory_holds_the_contract_s_files_and_nothing_else() {
    let folder = saved(&[1000]);
    assert_eq!(names(folder.path()), ["latest", "step-00001000"]);
    assert_eq!(
        names(&folder.path().join("step-00001000")),
        [
            "MANIFEST.json",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "optimizer.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
            "trainer_state.json"
        ]
    );
}

#[test]
fn the_same_run_writes_the_same_bytes() {
    let (one, two) = (saved(&[3]), saved(&[3]));
    for name in names(&one.path().join("step-00000003")) {
        let read = |folder: &TempDir| fs::read(folder.path().join("step-00000003").join(&name)).unwrap();
        assert_eq!(read(&one), read(&two), "{name}");
    }
}

#[test]
fn the_state_is_readable_json() {
    let folder = saved(&[3]);
    let text = fs::read_to_string(folder.path().join("step-00000003/trainer_state.json")).unwrap();
    insta::assert_snapshot!(text, @r#"
    {
      "format_version": 1,
      "step": 3,
      "tokens": 12288,
      "cursor": {
        "epoch": 0,
        "window": 3,
        "lanes": [
          null,
          3
        ]
      },
      "seed": 7,
      "identity": {
        "model.hidden_size": 8,
        "optimizer.beta1": 0.9
      },
      "evaluation_loss": null,
      "best": {
        "step": 1,
        "loss": 0.30000000000000004
      },
      "products": null,
      "ledger": null
    }
    "#);
}

#[test]
fn matmul_algorithms_round_trip_and_are_optional() {
    let folder = tempfile::tempdir().unwrap();
    let choices = BTreeMap::from([("4096 x 2048 x 2048 bf16".to_owned(), "13:2:0".to_owned())]);
    let matmul_algorithms = Some(MatmulAlgorithms { fingerprint: "NVIDIA GeForce RTX 5090".to_owned(), choices });
    let state = TrainerState { matmul_algorithms, ..state_at(3) };
    let checkpoint = Tiny::at(Precision::Fp32, 3).save(folder.path(), &state);
    assert_eq!(load_state(&checkpoint).unwrap(), state);

    let mut earlier: serde_json::Value = serde_json::to_value(state_at(3)).unwrap();
    earlier.as_object_mut().unwrap().remove("products").unwrap();
    let read = TrainerState::from_bytes(folder.path(), earlier.to_string().as_bytes()).unwrap();
    assert_eq!(read, state_at(3));
}

#[test]
fn optimizer_tensors_are_named_after_parameters() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Tiny::at(Precision::Bf16, 1).save(folder.path(), &state_at(1));
    let bytes = fs::read(checkpoint.join("optimizer.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let low_bits = file.tensor("model.layers.1.self_attn.k_proj.weight.master_remainder").unwrap();
    assert_eq!((low_bits.dtype(), low_bits.shape()), (safetensors::Dtype::I16, [4, 8].as_slice()));
    let moment = file.tensor("model.embed_tokens.weight.second_moment").unwrap();
    assert_eq!((moment.dtype(), moment.shape()), (safetensors::Dtype::F32, [67, 8].as_slice()));
}

#[test]
fn partial_optimizer_state_is_saved_for_its_parameters() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = model::hugging_face::hf_tensors(&tiny_shape());
    let parameter = tensors.iter().find(|tensor| tensor.name == "model.layers.0.mlp.down_proj.weight").unwrap();
    let range = parameter.offset..parameter.offset + parameter.elements;
    let layout = StateLayout::new("momentum", Category::OptimizerMoments, DType::F32, range);
    let numbers: Vec<f32> = (0..parameter.elements).map(|index| index as f32 / 7.0).collect();
    let with = |mut tiny: Tiny, numbers: &[f32]| {
        let mut buffer = Buffer::zeros(&[parameter.elements], DType::F32, &Device::Cpu).unwrap();
        buffer.write(numbers).unwrap();
        tiny.optimizer.push(StateTensor { layout: layout.clone(), buffer });
        tiny
    };
    let checkpoint = with(Tiny::at(Precision::Fp32, 1), &numbers).save(folder.path(), &state_at(1));
    let bytes = fs::read(checkpoint.join("optimizer.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let saved: Vec<_> = file.names().into_iter().filter(|name| name.ends_with(".momentum")).collect();
    assert_eq!(saved, [&format!("{}.momentum", parameter.name)]);
    let mut read = with(Tiny::zeros(Precision::Fp32), &vec![0.0; parameter.elements]);
    read.restore(&checkpoint).unwrap();
    assert_eq!(read.optimizer.last().unwrap().buffer.read_f32().unwrap(), numbers);
}

#[test]
fn a_checkpoint_of_another_model_or_precision_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Tiny::at(Precision::Fp32, 1).save(folder.path(), &state_at(1));
    let error = Tiny::zeros(Precision::Bf16).restore(&checkpoint).unwrap_err();
    assert!(matches!(error, CheckpointError::Mismatch { .. }), "{error}");
    for word in ["optimizer.safetensors", "master_remainder"] {
        assert!(error.to_string().contains(word), "{error}");
    }
    let mut other = Tiny::zeros(Precision::Fp32);
    other.shape.vocab_size = 66;
    let error = other.restore(&checkpoint).unwrap_err();
    assert!(matches!(error, CheckpointError::Mismatch { .. }), "{error}");
    assert!(error.to_string().contains("model.embed_tokens.weight"), "{error}");
}

#[test]
fn another_format_version_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut state = state_at(1);
    state.format_version = 2;
    let checkpoint = Tiny::at(Precision::Fp32, 1).save(folder.path(), &state);
    let error = load_state(&checkpoint).unwrap_err();
    assert!(error.to_string().contains("its format is 2"), "{error}");
    assert_eq!(error.exit_code(), 2);
}

#[test]
fn files_beside_the_tokenizer_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    fs::write(&path, "{}").unwrap();
    let sibling_files =
        [("tokenizer_config.json", "own"), ("special_tokens_map.json", "map"), ("chat_template.jinja", "{{}}")];
    for (name, content) in sibling_files {
        fs::write(folder.path().join(name), content).unwrap();
    }
    let files = TokenizerFiles::read(&path, &DocumentTokens::ended_by(0, "<|endoftext|>"), 16).unwrap();
    let read_files: Vec<_> = files.iter().skip(1).collect();
    assert_eq!(read_files, sibling_files.map(|(name, content)| (name, content.as_bytes())));
}

#[test]
fn tokenizer_files_say_whether_documents_start_with_bos() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    fs::write(&path, "{}").unwrap();
    let bos = Some(NamedToken { id: 1, name: "<s>".to_owned() });
    let ended_by = DocumentTokens::ended_by(2, "</s>");
    let config = |starts_with_bos, files_say_bos| {
        let marks = DocumentTokens { bos: bos.clone(), starts_with_bos, files_say_bos, ..ended_by.clone() };
        let files = TokenizerFiles::read(&path, &marks, 16).unwrap();
        assert_eq!((files.bos(), files.end_of_text()), (1, 2));
        let (_, content) = files.iter().find(|(name, _)| *name == "tokenizer_config.json").unwrap();
        serde_json::from_slice::<Value>(content).unwrap()
    };
    let plain = config(true, true);
    assert_eq!((&plain["bos_token"], &plain["eos_token"]), (&json!("<s>"), &json!("</s>")));
    assert_eq!(plain["add_bos_token"], Value::Null);
    fs::write(folder.path().join("tokenizer_config.json"), r#"{"bos_token": "<s>", "add_bos_token": true}"#).unwrap();
    assert_eq!(config(false, true), json!({ "bos_token": "<s>", "add_bos_token": false }));
}

#[test]
fn an_external_model_may_name_several_stop_tokens() {
    let folder = saved(&[1]);
    let checkpoint = folder.path().join("step-00000001");
    fs::remove_file(checkpoint.join("MANIFEST.json")).unwrap();
    let stop_tokens = || Checkpoint::open(&checkpoint).unwrap().model().unwrap().stop_tokens;
    assert_eq!(stop_tokens(), [0]);
    fs::write(checkpoint.join("generation_config.json"), r#"{"eos_token_id": [5, 7]}"#).unwrap();
    assert_eq!(stop_tokens(), [5, 7]);
    fs::write(checkpoint.join("generation_config.json"), "{}").unwrap();
    assert_eq!(stop_tokens(), [0], "that of config.json");
}

#[test]
fn an_external_model_needs_no_manifest() {
    let folder = saved(&[1]);
    let checkpoint = folder.path().join("step-00000001");
    fs::remove_file(checkpoint.join("MANIFEST.json")).unwrap();
    let mut tiny = Tiny::zeros(Precision::Fp32);
    let model = Checkpoint::open(&checkpoint).unwrap();
    model.weights(&model.model().unwrap().shape, &mut tiny.weights, &CancelToken::new()).unwrap();
    assert!(tiny.weights.flat.read_f32().unwrap().iter().any(|weight| *weight != 0.0));
    assert!(verify(&checkpoint, &CancelToken::new()).is_err(), "as a checkpoint to go on from it is corrupted");
}
