//! The Hub client against a loopback Hub that redirects to another port and fails on request.

use std::time::{Duration, Instant};

use crate::fixtures::{
    self, documents, folder_source, gzip, jsonl, open, parquet, sequences, settings, tokenizer, write,
};
use crate::loopback_hub::{self, Fault, LoopbackHub, SHA, streaming};
use dataset::hub::HubSettings;
use dataset::{Batch, CancelToken, DataError, DataSource, Documents, HeldOut, Mixture, StreamSettings, Until};
use run_config::NEWEST_READING_VERSION;

fn files() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("a/one.jsonl", jsonl(&documents(0, 40))),
        ("b/two.jsonl", jsonl(&documents(40, 40))),
        ("b/three.jsonl.gz", gzip(&jsonl(&documents(80, 40)))),
    ]
}

fn texts(source: &DataSource) -> Result<Vec<String>, DataError> {
    Documents::open(source, None).collect()
}

#[test]
fn hub_and_local_files_give_the_same_stream() {
    let hub = LoopbackHub::serve(&files());
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &files());
    let (remote, local) = (hub.source().unwrap(), folder_source(folder.path()));
    assert_eq!(remote.describe().revision.as_deref(), Some(SHA));
    assert_eq!(remote.describe().bytes, local.describe().bytes);
    assert_eq!(texts(&remote).unwrap(), texts(&local).unwrap());
    let stream = |source| sequences(&mut open(source, &settings(), None), 3).unwrap();
    assert_eq!(stream(&remote), stream(&local));
}

#[test]
fn transient_faults_change_no_byte() {
    let parquet = || parquet(&documents(0, 400), 50);
    let hub = LoopbackHub::serve(&[("data/train-00000-of-00001.parquet", parquet())]);
    let uninterrupted = texts(&hub.source().unwrap()).unwrap();
    assert_eq!(uninterrupted, documents(0, 400));
    let all = [
        Fault::Status(429),
        Fault::Status(500),
        Fault::Status(503),
        Fault::Truncate,
        Fault::WrongRange,
        Fault::NoRange,
        Fault::OtherSize,
        Fault::Hang,
    ];
    for fault in all {
        hub.fail("/cdn/", fault, 2);
        assert_eq!(texts(&hub.source().unwrap()).unwrap(), uninterrupted, "{fault:?}");
    }
    for fault in [Fault::Status(429), Fault::Status(502), Fault::Truncate, Fault::Hang] {
        for part in ["/revision/", "/tree/", "README.md", "/resolve/"] {
            hub.fail(part, fault, 1);
        }
        assert_eq!(texts(&hub.source().unwrap()).unwrap(), uninterrupted, "{fault:?}");
    }
}

#[test]
fn truncated_responses_resume_at_the_next_byte() {
    let hub = LoopbackHub::serve(&[("one.jsonl", jsonl(&documents(0, 900)))]);
    let source = hub.source().unwrap();
    hub.take_requests();
    // Each truncated response brings half of what is missing, and progress resets the count of failures.
    hub.fail("/cdn/", Fault::Truncate, 9);
    assert_eq!(texts(&source).unwrap().len(), 900);
    let requests = hub.take_requests();
    let starts: Vec<u64> = requests
        .iter()
        .filter(|request| request.cdn)
        .map(|request| request.range.as_ref().unwrap()["bytes=".len()..].split('-').next().unwrap().parse().unwrap())
        .collect();
    assert!(starts.windows(2).filter(|pair| pair[1] > pair[0]).count() >= 7, "{starts:?}");
}

#[test]
fn signed_urls_are_reused_until_they_expire() {
    let hub = LoopbackHub::serve(&[("one.parquet", parquet(&documents(0, 400), 40))]);
    let source = hub.source().unwrap();
    hub.take_requests();
    texts(&source).unwrap();
    let resolved = |requests: Vec<loopback_hub::Request>| {
        requests.iter().filter(|request| request.path.contains("/resolve/")).count()
    };
    assert_eq!(resolved(hub.take_requests()), 1);
    hub.fail("/cdn/", Fault::Status(403), 1);
    assert_eq!(texts(&source).unwrap().len(), 400);
    assert_eq!(resolved(hub.take_requests()), 2);
}

#[test]
fn the_token_is_sent_to_the_hub_only() {
    let hub = LoopbackHub::serve(&files()).with_token("hf_canary");
    let source = DataSource::streaming(
        &streaming("owner/name"),
        hub.settings(Some("hf_canary")),
        NEWEST_READING_VERSION,
        &CancelToken::new(),
    )
    .unwrap();
    assert_eq!(texts(&source).unwrap().len(), 120);
    let requests = hub.take_requests();
    assert!(requests.iter().any(|request| request.cdn));
    for request in requests {
        assert_eq!(request.token.is_some(), !request.cdn, "{request:?}");
    }
}

#[test]
fn gated_data_sets_ask_for_a_token() {
    let hub = LoopbackHub::serve(&files()).with_token("hf_right");
    let message = hub.source().unwrap_err().to_string();
    assert!(message.contains("401") && message.contains("set HF_TOKEN"), "{message}");
    let error = DataSource::streaming(
        &streaming("owner/name"),
        hub.settings(Some("hf_wrong")),
        NEWEST_READING_VERSION,
        &CancelToken::new(),
    )
    .unwrap_err();
    let message = error.to_string();
    assert!(message.contains("does not accept the token in HF_TOKEN") && !message.contains("hf_wrong"), "{message}");
}

#[test]
fn a_wrong_name_fails_at_once_with_its_url() {
    let hub = LoopbackHub::serve(&files());
    let error = DataSource::streaming(
        &streaming("owner/nome"),
        hub.settings(None),
        NEWEST_READING_VERSION,
        &CancelToken::new(),
    )
    .unwrap_err();
    let message = error.to_string();
    assert!(
        message.contains("404") && message.contains("owner/nome") && message.contains("check the name"),
        "{message}"
    );
    assert_eq!(hub.take_requests().len(), 1);
}

#[test]
fn persistent_faults_fail_without_the_signature() {
    let hub = LoopbackHub::serve(&files());
    let source = hub.source().unwrap();
    hub.take_requests();
    hub.fail("/cdn/a/", Fault::Status(500), 1000);
    let error = texts(&source).unwrap_err();
    assert!(matches!(error, DataError::Network { attempts: 3.., .. }), "{error}");
    let message = error.to_string();
    assert!(
        message.contains("/cdn/a/one.jsonl") && message.contains("500") && !message.contains("s3cret"),
        "{message}"
    );
    assert!(source.retry_status().is_none(), "no request is retried");
}

#[test]
fn a_file_that_changed_is_rejected() {
    let hub = LoopbackHub::serve(&files());
    let source = hub.source().unwrap();
    hub.fail("/cdn/", Fault::OtherSize, 1000);
    let message = texts(&source).unwrap_err().to_string();
    assert!(message.contains("changed"), "{message}");
}

#[test]
fn listings_of_many_pages_are_joined() {
    let names: Vec<String> = (0..25).map(|i| format!("data/part-{i:02}.jsonl")).collect();
    let files: Vec<(&str, Vec<u8>)> =
        names.iter().enumerate().map(|(i, name)| (name.as_str(), jsonl(&documents(i, 1)))).collect();
    let hub = LoopbackHub::serve(&files).with_page(10);
    assert_eq!(texts(&hub.source().unwrap()).unwrap(), documents(0, 25));
    assert_eq!(hub.take_requests().iter().filter(|request| request.path.contains("/tree/")).count(), 3);
}

#[test]
fn the_card_s_config_selects_the_files() {
    let card = "---\nconfigs:\n- config_name: small\n  data_files: b/*.jsonl\n- config_name: default\n  data_files: a/*\n---\n";
    let mut files = files();
    files.push(("README.md", card.as_bytes().to_vec()));
    let hub = LoopbackHub::serve(&files);
    assert_eq!(texts(&hub.source().unwrap()).unwrap(), documents(0, 40));
    let small = run_config::StreamingConfig { config: Some("small".to_owned()), ..streaming("owner/name") };
    let source =
        DataSource::streaming(&small, hub.settings(None), NEWEST_READING_VERSION, &CancelToken::new()).unwrap();
    assert_eq!(texts(&source).unwrap(), documents(40, 40));
    assert!(hub.take_requests().iter().any(|request| request.path.contains("/tree/") && request.path.contains("/b?")));
}

#[test]
fn dropping_a_stream_does_not_wait_for_retries() {
    let hub = LoopbackHub::serve(&files());
    let mut long_retries = hub.settings(None);
    long_retries.initial_backoff = Duration::from_hours(1);
    let source =
        DataSource::streaming(&streaming("owner/name"), long_retries, NEWEST_READING_VERSION, &CancelToken::new())
            .unwrap();
    hub.take_requests();
    hub.fail("/resolve/", Fault::Truncate, 1000);
    hub.fail("/cdn/", Fault::Truncate, 1000);
    let stream = open(&source, &settings(), None);
    while hub.take_requests().is_empty() {
        std::thread::yield_now();
    }
    let start = Instant::now();
    drop(stream);
    assert!(start.elapsed() < Duration::from_secs(3));
}

#[test]
fn evaluation_can_be_interrupted_without_loss() {
    let files: Vec<(String, Vec<u8>)> =
        (0..8).map(|i| (format!("data/{i}.parquet"), parquet(&documents(100 * i, 100), 50))).collect();
    let hub = LoopbackHub::serve(&files.iter().map(|(name, bytes)| (name.as_str(), bytes.clone())).collect::<Vec<_>>());
    let long_retries = HubSettings { retry_timeout: Duration::from_hours(1), ..hub.settings(None) };
    let source =
        DataSource::streaming(&streaming("owner/name"), long_retries, NEWEST_READING_VERSION, &CancelToken::new())
            .unwrap();
    let held_out = || {
        HeldOut::whole(&source, &StreamSettings { sequence_length: 32, ..StreamSettings::default() }, &tokenizer())
            .unwrap()
    };
    let uninterrupted: Vec<Batch> = held_out().batches(4, usize::MAX).map(Result::unwrap).collect();
    let mut disturbed = held_out();
    hub.fail("/cdn/", Fault::Hang, usize::MAX);
    for _ in 0..2 {
        let end = disturbed.batches(4, usize::MAX).unless(&|| true).last().unwrap();
        assert!(matches!(end, Err(DataError::Interrupted)), "{end:?}");
    }
    hub.clear_faults();
    assert_eq!(disturbed.batches(4, usize::MAX).map(Result::unwrap).collect::<Vec<_>>(), uninterrupted);
}

#[test]
fn a_second_run_reads_from_the_block_cache() {
    let hub = LoopbackHub::serve(&files());
    let folder = tempfile::tempdir().unwrap();
    let settings = HubSettings { cache: Some((folder.path().to_owned(), 1 << 30)), ..hub.settings(None) };
    let source = || {
        DataSource::streaming(&streaming("owner/name"), settings.clone(), NEWEST_READING_VERSION, &CancelToken::new())
            .unwrap()
    };
    let uninterrupted = texts(&hub.source().unwrap()).unwrap();
    hub.take_requests();
    let from_cdn = |hub: &LoopbackHub| hub.take_requests().iter().filter(|request| request.cdn).count();
    assert_eq!(texts(&source()).unwrap(), uninterrupted);
    assert!(from_cdn(&hub) > 0);
    assert_eq!(texts(&source()).unwrap(), uninterrupted);
    assert_eq!(from_cdn(&hub), 0, "all blocks are cached");
}

#[test]
fn an_interrupted_call_can_be_repeated() {
    let files = [("data/train.parquet", parquet(&documents(0, 200), 20))];
    let hub = LoopbackHub::serve(&files);
    let source = hub.source().unwrap();
    let uninterrupted = sequences(&mut open(&source, &settings(), None), 3).unwrap();
    hub.fail("/cdn/", Fault::Hang, 5);
    let mut stream = open(&hub.source().unwrap(), &settings(), None);
    let (mut interruptions, mut all) = (0, Vec::new());
    loop {
        match stream.next_sequences_until(Until::Count(3), &|| true) {
            Err(DataError::Interrupted) => interruptions += 1,
            batch if batch.as_ref().is_ok_and(Batch::is_empty) => break,
            batch => all.extend(fixtures::rows(&batch.unwrap())),
        }
    }
    assert!(interruptions > 0);
    assert_eq!(all, uninterrupted);
}

#[test]
fn cancellation_ends_reading_on_the_caller_s_thread() {
    let hub = LoopbackHub::serve(&[("data/train.parquet", parquet(&documents(0, 200), 20))]);
    let interrupted = CancelToken::when(|| true);
    let listed =
        DataSource::streaming(&streaming("owner/name"), hub.settings(None), NEWEST_READING_VERSION, &interrupted);
    assert!(matches!(listed, Err(DataError::Interrupted)));
    let data = Mixture::from(hub.source().unwrap()).cancelled_by(&interrupted);
    let source = &data.sources()[0];
    assert!(matches!(Documents::open(&data, None).next(), Some(Err(DataError::Interrupted))));
    assert!(matches!(HeldOut::open(source, &settings(), &tokenizer()), Err(DataError::Interrupted)));
    assert!(matches!(
        HeldOut::whole(source, &StreamSettings { sequence_length: 8, ..StreamSettings::default() }, &tokenizer()),
        Err(DataError::Interrupted)
    ));
}
