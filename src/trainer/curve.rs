//! The loss curve of a run: as an SVG for its folder, and as a few lines of characters for the terminal.
//!
//! Called by the folder of a run when it saves and when it ends. Any points draw something: none, one, or a million, and those
//! that are not finite are left out.

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::error::{Error, Result};

/// (step, nats a token).
pub type Point = (f64, f64);

/// How much of the plane a curve takes.
struct Frame {
    steps: (f64, f64),
    losses: (f64, f64),
    /// Equal ratios of loss look equally high: used when the first loss would flatten all the others.
    log: bool,
}

impl Frame {
    fn around(train: &[Point], validation: &[Point]) -> Self {
        let points = || train.iter().chain(validation).filter(|(_, loss)| loss.is_finite());
        let (mut steps, mut losses) = ((f64::MAX, f64::MIN), (f64::MAX, f64::MIN));
        for &(step, loss) in points() {
            steps = (steps.0.min(step), steps.1.max(step));
            losses = (losses.0.min(loss), losses.1.max(loss));
        }
        if points().next().is_none() {
            (steps, losses) = ((0.0, 1.0), (0.0, 1.0));
        }
        let log = losses.0 > 0.0 && losses.1 / losses.0 > 2.5;
        // Room around the points, which also gives a single point an extent.
        let losses = if log {
            (losses.0 / 1.06, losses.1 * 1.06)
        } else {
            let room = ((losses.1 - losses.0) * 0.05).max(losses.1.abs() * 0.01).max(1e-6);
            (losses.0 - room, losses.1 + room)
        };
        Self { steps: (steps.0, steps.1.max(steps.0 + 1.0)), losses, log }
    }

    /// Where a loss lies between the lowest (0) and the highest (1).
    fn height(&self, loss: f64) -> f64 {
        let (low, high) = self.losses;
        if self.log { (loss / low).ln() / (high / low).ln() } else { (loss - low) / (high - low) }
    }

    /// The loss at a height.
    fn loss(&self, height: f64) -> f64 {
        let (low, high) = self.losses;
        if self.log { low * (high / low).powf(height) } else { low + (high - low) * height }
    }

    /// Round losses for the axis, from four to about ten of them.
    fn ticks(&self) -> Vec<f64> {
        let (low, high) = self.losses;
        let mut step = 10f64.powf((high - low).log10().floor());
        while (high - low) / step < 4.0 {
            step /= if (high - low) / step < 2.0 { 4.0 } else { 2.0 };
        }
        let linear = ((low / step).ceil() as i64..=(high / step).floor() as i64).map(|i| i as f64 * step);
        if !self.log {
            return linear.collect();
        }
        let decades = low.log10().floor() as i32..=high.log10().ceil() as i32;
        let all = |digits: &[f64]| {
            let ticks = decades.clone().flat_map(|decade| digits.iter().map(move |d| d * 10f64.powi(decade)));
            ticks.filter(|tick| (low..=high).contains(tick)).collect::<Vec<_>>()
        };
        let fine = all(&[1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]);
        let coarse = all(&[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0]);
        let bare = all(&[1.0, 2.0, 5.0]);
        [fine, coarse].into_iter().find(|ticks| ticks.len() <= 12).unwrap_or(bare)
    }
}

/// The training curve (pale, with its smoothed form) and the validation curve over the steps.
pub fn svg(train: &[Point], validation: &[Point]) -> Result<String> {
    let mut text = String::new();
    let area = SVGBackend::with_string(&mut text, (960, 540)).into_drawing_area();
    draw(area, train, validation).map_err(|e| Error::failed(format!("drawing the loss curve: {e}")))?;
    Ok(text)
}

const TRAIN: RGBColor = RGBColor(38, 99, 176);
const VALIDATION: RGBColor = RGBColor(214, 90, 24);

type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

fn draw(area: DrawingArea<SVGBackend, Shift>, train: &[Point], validation: &[Point]) -> Drawn {
    area.fill(&WHITE)?;
    let frame = Frame::around(train, validation);
    let mut chart = ChartBuilder::on(&area)
        .caption("Loss", ("sans-serif", 20))
        .margin(14)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(frame.steps.0..frame.steps.1, 0.0..1.0)?;
    let scale = if frame.log { "loss (nats/token, log scale)" } else { "loss (nats/token)" };
    chart
        .configure_mesh()
        .disable_y_mesh()
        .y_labels(0)
        .x_label_formatter(&|step| format!("{step:.0}"))
        .x_desc("step")
        .y_desc(scale)
        .label_style(("sans-serif", 13))
        .axis_desc_style(("sans-serif", 15))
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.08))
        .draw()?;
    draw_loss_axis(&mut chart, &frame)?;
    let plane = |points: Vec<Point>| points.into_iter().map(|(x, y)| (x, frame.height(y))).collect::<Vec<_>>();
    let raw = plane(thinned(train, 800));
    chart.draw_series(LineSeries::new(raw, TRAIN.mix(0.25).stroke_width(1)))?;
    let smooth = LineSeries::new(plane(smoothed(train)), TRAIN.stroke_width(2));
    chart.draw_series(smooth)?.label("training").legend(|(x, y)| swatch(x, y, TRAIN));
    let held_out = plane(thinned(validation, 800));
    chart
        .draw_series(LineSeries::new(held_out.clone(), VALIDATION.stroke_width(2)))?
        .label("validation")
        .legend(|(x, y)| swatch(x, y, VALIDATION));
    chart.draw_series(held_out.into_iter().map(|point| Circle::new(point, 3, VALIDATION.filled())))?;
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .margin(12)
        .label_font(("sans-serif", 14))
        .background_style(WHITE.mix(0.9))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    Ok(area.present()?)
}

fn swatch(x: i32, y: i32, color: RGBColor) -> PathElement<(i32, i32)> {
    PathElement::new(vec![(x, y), (x + 18, y)], color.stroke_width(3))
}

type Chart<'a, 'b> = ChartContext<
    'a,
    SVGBackend<'b>,
    Cartesian2d<plotters::coord::types::RangedCoordf64, plotters::coord::types::RangedCoordf64>,
>;

/// Lines and labels at round losses; plotters' own logarithmic axis labels only powers of ten.
fn draw_loss_axis(chart: &mut Chart, frame: &Frame) -> Drawn {
    let ticks = frame.ticks();
    let line = |loss: f64| vec![(frame.steps.0, frame.height(loss)), (frame.steps.1, frame.height(loss))];
    chart.draw_series(ticks.iter().map(|loss| PathElement::new(line(*loss), BLACK.mix(0.08))))?;
    let style = TextStyle::from(("sans-serif", 13)).pos(plotters::style::text_anchor::Pos::new(
        plotters::style::text_anchor::HPos::Right,
        plotters::style::text_anchor::VPos::Center,
    ));
    let digits = digits_of(&ticks);
    let label = |loss: f64| {
        let at = EmptyElement::at((frame.steps.0, frame.height(loss)));
        at + Text::new(format!("{loss:.digits$}"), (-8, 0), style.clone())
            + PathElement::new(vec![(-5, 0), (0, 0)], BLACK)
    };
    let labels: Vec<_> = ticks.into_iter().map(label).collect();
    // Labels lie left of the plane, so they are drawn on the whole area, where nothing clips them.
    let plotting = chart.plotting_area();
    labels.iter().try_for_each(|element| plotting.draw(element))?;
    Ok(())
}

/// Decimals that tell the ticks apart.
fn digits_of(ticks: &[f64]) -> usize {
    let gap = ticks.windows(2).map(|w| w[1] - w[0]).fold(f64::MAX, f64::min);
    (0..6).find(|digits| gap >= 10f64.powi(-digits) * 0.999 && exact(ticks, *digits)).unwrap_or(6) as usize
}

fn exact(ticks: &[f64], digits: i32) -> bool {
    let factor = 10f64.powi(digits);
    ticks.iter().all(|tick| ((tick * factor).round() - tick * factor).abs() < 1e-6 * factor.max(1.0))
}

/// At most `most` points: means over equal runs of them.
fn thinned(points: &[Point], most: usize) -> Vec<Point> {
    let finite: Vec<_> = points.iter().filter(|(_, loss)| loss.is_finite()).collect();
    let run = finite.len().div_ceil(most).max(1);
    let mean = |chunk: &[&Point]| {
        let n = chunk.len() as f64;
        (chunk.iter().map(|p| p.0).sum::<f64>() / n, chunk.iter().map(|p| p.1).sum::<f64>() / n)
    };
    finite.chunks(run).map(mean).collect()
}

/// The curve without the noise of single batches: a centred mean whose reach grows from nothing at the first step, where
/// the loss falls fast, to 2 % of the run.
fn smoothed(points: &[Point]) -> Vec<Point> {
    let points = thinned(points, 2000);
    let most = points.len() / 50;
    let mean = |i: usize| {
        let reach = most.min(i / 4).min(points.len() - 1 - i);
        let near = &points[i - reach..=i + reach];
        near.iter().map(|p| p.1).sum::<f64>() / near.len() as f64
    };
    (0..points.len()).map(|i| (points[i].0, mean(i))).collect()
}

/// The curve as lines of characters, `width` columns wide with its labels and `height` lines high with its axis.
pub fn characters(train: &[Point], validation: &[Point], width: usize, height: usize) -> String {
    const LABEL: usize = 9;
    let frame = Frame::around(train, validation);
    let (columns, rows) = (width.saturating_sub(LABEL).max(8), height.saturating_sub(2).max(3));
    let mut cells = vec![vec![' '; columns]; rows];
    let column = |step: f64| {
        let share = (step - frame.steps.0) / (frame.steps.1 - frame.steps.0);
        (share * (columns - 1) as f64).round() as usize
    };
    let row =
        |loss: f64| ((1.0 - frame.height(loss)) * (rows - 1) as f64).round().clamp(0.0, (rows - 1) as f64) as usize;
    for (step, loss) in smoothed(train) {
        cells[row(loss)][column(step)] = '·';
    }
    for (step, loss) in thinned(validation, columns) {
        cells[row(loss)][column(step)] = 'o';
    }
    let mut text = String::new();
    for (i, line) in cells.iter().enumerate() {
        let labelled = i == 0 || i == rows - 1 || i == rows / 2;
        let loss = frame.loss(1.0 - i as f64 / (rows - 1) as f64);
        let label = if labelled { format!("{loss:>7.3}") } else { String::new() };
        let line: String = line.iter().collect();
        text += format!("{label:>7} |{}", line.trim_end()).trim_end();
        text.push('\n');
    }
    text += &format!("{:>7} +{}\n", "", "-".repeat(columns));
    let legend = if validation.is_empty() { "· training" } else { "· training   o validation" };
    let (first, last) = (format!("{:.0}", frame.steps.0), format!("{:.0}", frame.steps.1));
    let between = columns.saturating_sub(first.len() + last.len());
    text += &format!("{:>LABEL$}{first}{legend:^between$}{last}\n", "");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(steps: u64) -> (Vec<Point>, Vec<Point>) {
        let loss = |s: f64| 0.62 + 5.2 * (-s / 40.0).exp() + 0.6 / (1.0 + s / 60.0);
        let noise = |s: u64| 1.0 + 0.04 * ((s * 7919 % 101) as f64 / 50.0 - 1.0);
        let train = (1..=steps).map(|s| (s as f64, loss(s as f64) * noise(s))).collect();
        (train, (1..=steps).filter(|s| s % 150 == 0).map(|s| (s as f64, loss(s as f64) + 0.03)).collect())
    }

    #[test]
    fn the_picture_has_both_curves_a_title_and_round_losses() {
        let (train, validation) = curve(900);
        let text = svg(&train, &validation).unwrap();
        for part in ["Loss", "training", "validation", "log scale", "step", "\n6.0\n", "\n0.8\n"] {
            assert!(text.contains(part), "{part}");
        }
        assert!(text.matches("<polyline").count() >= 3);
        assert!(text.len() < 200_000, "{} bytes", text.len());
    }

    #[test]
    fn any_points_draw_something() {
        let one = (vec![(1.0, 2.0)], Vec::new());
        let bad = (vec![(1.0, f64::NAN), (2.0, f64::INFINITY), (3.0, 1.0)], vec![(3.0, f64::NAN)]);
        let zero = (vec![(1.0, 0.0), (2.0, 0.0)], vec![]);
        for (train, validation) in [Default::default(), one, bad, zero, curve(100_000)] {
            let text = svg(&train, &validation).unwrap();
            assert!(!text.contains("NaN") && !text.contains("inf"));
            assert!(text.len() < 300_000, "{} bytes", text.len());
            for (width, height) in [(72, 12), (1, 1), (0, 0), (200, 3)] {
                assert!(!characters(&train, &validation, width, height).contains("NaN"));
            }
        }
    }

    #[test]
    fn a_small_range_of_losses_is_drawn_on_a_linear_axis() {
        let text = svg(&[(1.0, 1.42), (2.0, 1.3), (3.0, 1.22)], &[]).unwrap();
        assert!(!text.contains("log scale") && text.contains("\n1.25\n"));
    }

    #[test]
    fn characters_fall_from_the_upper_left_to_the_lower_right() {
        let (train, validation) = curve(900);
        let text = characters(&train, &validation, 60, 12);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 12);
        assert!(lines.iter().all(|line| line.chars().count() <= 60), "{text}");
        assert!(lines[0].contains("|·"), "the first loss is the highest: {text}");
        assert!(lines[9].ends_with('·'), "the last loss is the lowest: {text}");
        assert!(lines[8].matches('o').count() >= 4, "{text}");
        assert!(lines[11].contains("training") && lines[11].ends_with("900"), "{text}");
    }

    #[test]
    fn smoothing_keeps_the_first_loss_and_the_length() {
        let (train, _) = curve(900);
        let smooth = smoothed(&train);
        assert_eq!((smooth.len(), smooth[0].1), (900, train[0].1));
        assert_eq!(thinned(&train, 100).len(), 100);
    }
}
