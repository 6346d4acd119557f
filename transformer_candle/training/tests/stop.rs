//! Ctrl-C in a process of its own: the first one requests a stop, the second one exits immediately.

#![allow(clippy::unwrap_used)]

use std::{
    env,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use training::stop::StopSignal;

const CHILD: &str = "TRAINING_TEST_IS_A_CHILD";

fn wait_until_it_ends(child: &mut Child) -> Option<i32> {
    let deadline = Instant::now() + Duration::from_secs(20);
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    panic!("it does not end");
}

#[test]
fn the_second_ctrl_c_exits_immediately() {
    if env::var_os(CHILD).is_some() {
        let stop = StopSignal::new();
        let _listening = stop.listen().unwrap();
        println!("ready");
        while stop.requested().is_none() {
            thread::sleep(Duration::from_millis(1));
        }
        println!("asked");
        thread::sleep(Duration::from_mins(1));
        return;
    }
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "--nocapture", "the_second_ctrl_c_exits_immediately"])
        .env(CHILD, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let pid = Pid::from_child(&child);
    for word in ["ready", "asked"] {
        assert!(lines.any(|line| line.ends_with(word)), "the child says it is {word}");
        assert!(child.try_wait().unwrap().is_none(), "and lives");
        kill_process(pid, Signal::INT).unwrap();
    }
    assert_eq!(wait_until_it_ends(&mut child), Some(130));
}
