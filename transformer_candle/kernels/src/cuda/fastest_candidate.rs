//! The search for the fastest of several candidates, over a function that times them.
//!
//! All candidates are timed briefly, in milliseconds of the GPU: A 1.00, B 0.97, C 2.31, D 0.99, E 1.03, F 0.98, ...
//! A GPU that was idle runs at its boost clock for a moment, and an algorithm that draws more power than another loses
//! its lead when the clock settles at the power limit, which is where training runs. So the fastest few are timed again
//! in turns, A B D F, A B D F, A B D F, in the library's order, each turn long enough for the clock to settle, and the
//! lowest median wins.

/// Milliseconds of the GPU after which no other candidate is timed briefly.
const BRIEF_MILLISECONDS: f32 = 500.0;
/// Short work runs several times in a brief timing, so that the events' resolution of half a microsecond does not decide.
const SAMPLE_MILLISECONDS: f32 = 0.3;
const MOST_RUNS_IN_A_SAMPLE: usize = 10;
/// A candidate that is slower than the fastest by this factor in one run is not timed again.
const HOPELESS: f32 = 1.5;

/// Candidates that are timed in turns.
const FINALISTS: usize = 4;
/// A candidate that is slower than the fastest by this factor is none of them: clocks differ by less.
const FINALIST: f32 = 1.2;
const ROUNDS: usize = 3;
/// Half of a turn. In the first half the clock settles, the second is timed.
const HALF_TURN_MILLISECONDS: f32 = 15.0;
/// Work of less than 0.15 ms gets shorter turns: what it draws decides nothing, and launching it would take longer.
const MOST_RUNS_IN_A_HALF_TURN: usize = 100;
/// No round begins that would end later than this after the first, by the host's clock.
const ROUNDS_MILLISECONDS: f32 = 500.0;

/// Two brief timings closer than this are the same: the library's own order then decides, so that another run chooses
/// alike.
const INDISTINGUISHABLE: f32 = 1.02;

/// The time that several runs in a row took, in milliseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Elapsed {
    /// Of the GPU, without the run that leads in.
    pub(crate) gpu: f32,
    /// Of the host, until all runs had ended: what the search costs. Far more than `gpu` where every launch is slow, as
    /// under a profiler.
    pub(crate) host: f32,
}

/// Milliseconds per run of a candidate, timed briefly.
#[derive(Clone, Copy)]
struct Brief {
    gpu: f32,
    host: f32,
}

impl Brief {
    fn new(elapsed: Elapsed, runs: usize) -> Self {
        Self { gpu: elapsed.gpu / runs as f32, host: elapsed.host / (1 + runs) as f32 }
    }
}

/// A candidate that is timed in turns.
struct Finalist {
    candidate: usize,
    /// Runs in half a turn.
    runs: usize,
    /// Milliseconds that a turn is expected to take.
    turn: f32,
    /// Milliseconds per run in each turn.
    times: Vec<f32>,
    is_refused: bool,
}

/// Returns the fastest of `count` candidates, of which those in front are preferred; None if none runs. `time` runs a
/// candidate once to lead in (which loads its kernel, and keeps the GPU busy while the next runs are launched), then so
/// many times; None where that is refused.
///
/// # Errors
/// Those of `time`.
pub(crate) fn fastest_candidate<E>(
    count: usize,
    mut time: impl FnMut(usize, usize) -> Result<Option<Elapsed>, E>,
) -> Result<Option<usize>, E> {
    let mut brief = time_briefly(count, &mut time)?;
    let mut finalists = finalists(&brief);
    if finalists.len() > 1 {
        time_in_turns(&mut finalists, &mut time)?;
    }
    for finalist in finalists.iter().filter(|finalist| finalist.is_refused) {
        brief[finalist.candidate] = None;
    }
    let milliseconds: Vec<Option<f32>> = brief.iter().map(|brief| brief.map(|brief| brief.gpu)).collect();
    Ok(lowest_median(&finalists).or_else(|| best(&milliseconds)))
}

/// Times each candidate in the order of preference, until the time is spent.
fn time_briefly<E>(
    count: usize,
    time: &mut impl FnMut(usize, usize) -> Result<Option<Elapsed>, E>,
) -> Result<Vec<Option<Brief>>, E> {
    let mut timings: Vec<Option<Brief>> = Vec::with_capacity(count);
    let (mut fastest, mut spent) = (f32::INFINITY, 0.0);
    for candidate in 0..count {
        if spent > BRIEF_MILLISECONDS {
            break;
        }
        let mut timing = None;
        if let Some(once) = time(candidate, 1)? {
            spent += 2.0 * once.gpu;
            timing = Some(Brief::new(once, 1));
            if once.gpu < SAMPLE_MILLISECONDS.min(HOPELESS * fastest) {
                let runs = runs_within(SAMPLE_MILLISECONDS, once.gpu, MOST_RUNS_IN_A_SAMPLE);
                let sample = time(candidate, runs)?;
                timing = sample.map(|sample| Brief::new(sample, runs));
                spent += timing.map_or(0.0, |timing| (1 + runs) as f32 * timing.gpu);
            }
        }
        fastest = timing.map_or(fastest, |timing| timing.gpu.min(fastest));
        timings.push(timing);
    }
    Ok(timings)
}

/// The candidates to time in turns, in the order of preference.
fn finalists(brief: &[Option<Brief>]) -> Vec<Finalist> {
    let mut ranked: Vec<(usize, Brief)> =
        brief.iter().enumerate().filter_map(|(candidate, brief)| Some((candidate, (*brief)?))).collect();
    // Stable: of equals the first is preferred.
    ranked.sort_by(|(_, one), (_, other)| one.gpu.total_cmp(&other.gpu));
    let limit = ranked.first().map_or(0.0, |(_, fastest)| fastest.gpu * FINALIST);
    ranked.retain(|(_, brief)| brief.gpu <= limit);
    ranked.truncate(FINALISTS);
    ranked.sort_by_key(|(candidate, _)| *candidate);
    let finalist = |(candidate, Brief { gpu, host }): (usize, Brief)| {
        let per_run = gpu.max(host);
        let runs = runs_within(HALF_TURN_MILLISECONDS, per_run, MOST_RUNS_IN_A_HALF_TURN);
        let turn = 2.0 * (1 + runs) as f32 * per_run;
        Finalist { candidate, runs, turn, times: Vec::new(), is_refused: false }
    };
    ranked.into_iter().map(finalist).collect()
}

/// Times the finalists in whole rounds, as many as there is time for.
fn time_in_turns<E>(
    finalists: &mut [Finalist],
    time: &mut impl FnMut(usize, usize) -> Result<Option<Elapsed>, E>,
) -> Result<(), E> {
    let round: f32 = finalists.iter().map(|finalist| finalist.turn).sum();
    let mut spent = 0.0;
    for _ in 0..ROUNDS {
        if spent + round > ROUNDS_MILLISECONDS {
            break;
        }
        for finalist in finalists.iter_mut().filter(|finalist| !finalist.is_refused) {
            let settling = time(finalist.candidate, finalist.runs)?;
            let timed = time(finalist.candidate, finalist.runs)?;
            let (Some(settling), Some(timed)) = (settling, timed) else {
                finalist.is_refused = true;
                continue;
            };
            spent += settling.host + timed.host;
            finalist.times.push(timed.gpu / finalist.runs as f32);
        }
    }
    Ok(())
}

/// The finalist with the lowest median, of exact equals the preferred one; None if no round was timed.
fn lowest_median(finalists: &[Finalist]) -> Option<usize> {
    let medians = finalists.iter().filter(|finalist| !finalist.is_refused);
    let medians = medians.filter_map(|finalist| Some((finalist.candidate, median(&mut finalist.times.clone())?)));
    medians.min_by(|(_, one), (_, other)| one.total_cmp(other)).map(|(candidate, _)| candidate)
}

/// The runs that take so many milliseconds together, from 1 to `most`.
fn runs_within(milliseconds: f32, per_run: f32, most: usize) -> usize {
    (milliseconds / per_run).ceil().clamp(1.0, most as f32) as usize
}

/// The index of the candidate to keep, of brief timings in the library's order of preference; None stands for one that
/// failed.
fn best(milliseconds: &[Option<f32>]) -> Option<usize> {
    let fastest = milliseconds.iter().flatten().copied().min_by(f32::total_cmp)?;
    milliseconds.iter().position(|time| time.is_some_and(|time| time <= fastest * INDISTINGUISHABLE))
}

/// The median, of an even number the lower one of the two; None of no values.
pub(crate) fn median(values: &mut [f32]) -> Option<f32> {
    values.sort_by(f32::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied()
}

#[cfg(test)]
#[path = "fastest_candidate_tests.rs"]
mod tests;
