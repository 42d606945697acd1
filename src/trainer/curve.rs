//! The loss curve of a run, as an SVG and as a few lines of characters.

use plotters::prelude::*;

use crate::error::{Error, Result};

/// (step, nats a token).
pub type Point = (f64, f64);

/// The training curve (thin, with its running mean) and the validation curve over steps. Loss is on a logarithmic axis.
pub fn svg(train: &[Point], validation: &[Point]) -> Result<String> {
    let mut text = String::new();
    draw(&mut text, train, validation).map_err(|e| Error::failed(format!("drawing the loss curve: {e}")))?;
    Ok(text)
}

fn draw(
    text: &mut String,
    train: &[Point],
    validation: &[Point],
) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let (blue, light, red) = (RGBColor(31, 90, 166), RGBColor(176, 201, 232), RGBColor(200, 60, 40));
    let (steps, losses) = range(train.iter().chain(validation));
    let area = SVGBackend::with_string(text, (800, 480)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption("loss", ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(steps.0..steps.1, (losses.0..losses.1).log_scale())?;
    let decimals = |y: &f64| format!("{y:.2}");
    let whole = |x: &f64| format!("{x:.0}");
    let mut mesh = chart.configure_mesh();
    mesh.x_desc("step").y_desc("nats a token").y_label_formatter(&decimals).x_label_formatter(&whole);
    mesh.light_line_style(WHITE).draw()?;
    chart.draw_series(LineSeries::new(thinned(train, 1500), light))?;
    let line = |colour: RGBColor| move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2));
    let train = chart.draw_series(LineSeries::new(running_mean(train), blue.stroke_width(2)))?;
    train.label("training (running mean)").legend(line(blue));
    let held_out = chart.draw_series(LineSeries::new(validation.to_vec(), red.stroke_width(2)).point_size(3))?;
    held_out.label("validation").legend(line(red));
    let labels = chart.configure_series_labels().border_style(light).background_style(WHITE).draw();
    labels?;
    area.present()?;
    Ok(())
}

/// The spans of steps and losses, never empty.
fn range<'a>(points: impl Iterator<Item = &'a Point>) -> ((f64, f64), (f64, f64)) {
    let (mut steps, mut losses) = ((f64::MAX, f64::MIN), (f64::MAX, f64::MIN));
    for (x, y) in points.filter(|(_, y)| y.is_finite() && *y > 0.0) {
        steps = (steps.0.min(*x), steps.1.max(*x));
        losses = (losses.0.min(*y), losses.1.max(*y));
    }
    if steps.0 > steps.1 {
        return ((0.0, 1.0), (0.1, 10.0));
    }
    ((steps.0.min(steps.1 - 1.0), steps.1), (losses.0 * 0.95, losses.1 * 1.05))
}

/// At most `most` of the points, evenly chosen.
fn thinned(points: &[Point], most: usize) -> Vec<Point> {
    points.iter().step_by(points.len().div_ceil(most).max(1)).copied().collect()
}

/// Exponential running mean over about a fiftieth of the run, without the bias of its start.
fn running_mean(points: &[Point]) -> Vec<Point> {
    let keep = 1.0 - 1.0 / (points.len() as f64 / 50.0).max(1.0);
    let (mut sum, mut weight) = (0.0, 0.0);
    let mean = points.iter().filter(|(_, y)| y.is_finite()).map(|(x, y)| {
        sum = keep * sum + y;
        weight = keep * weight + 1.0;
        (*x, sum / weight)
    });
    thinned(&mean.collect::<Vec<_>>(), 1500)
}

/// The curve in `height` lines of `width` columns: training as dots, validation as circles.
pub fn characters(train: &[Point], validation: &[Point], width: usize, height: usize) -> String {
    if train.is_empty() || height < 2 {
        return String::new();
    }
    let smooth = running_mean(train);
    let ((first, last), (low, high)) = range(smooth.iter().chain(validation));
    let mut cells = vec![vec![' '; width]; height];
    let mut put = |points: &[Point], mark: char| {
        for (x, y) in points.iter().filter(|(_, y)| y.is_finite() && *y > 0.0) {
            let column = ((x - first) / (last - first) * (width - 1) as f64).round() as usize;
            let share = (y.ln() - low.ln()) / (high.ln() - low.ln());
            let row = ((1.0 - share) * (height - 1) as f64).round() as usize;
            cells[row.min(height - 1)][column.min(width - 1)] = mark;
        }
    };
    put(&smooth, '.');
    put(validation, 'o');
    let label = |row: usize| high * (low / high).powf(row as f64 / (height - 1) as f64);
    let lines = cells
        .iter()
        .enumerate()
        .map(|(row, cells)| format!("{:7.3} |{}", label(row), cells.iter().collect::<String>().trim_end()));
    let mut text: String = lines.map(|line| line + "\n").collect();
    text += &format!(
        "        +{}\n         {first:<8.0}{:>w$.0}   . training   o validation\n",
        "-".repeat(width),
        last,
        w = width - 8
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(n: usize) -> Vec<Point> {
        (1..=n).map(|i| (i as f64, 1.0 + 4.0 / i as f64)).collect()
    }

    #[test]
    fn any_number_of_points_is_drawn() {
        for n in [0, 1, 2, 100, 5000] {
            let text = svg(&curve(n), &curve(n.min(4))).unwrap();
            assert!(text.contains("<svg") && text.contains("validation") && text.len() < 200_000, "{n}");
            let lines = characters(&curve(n), &curve(n.min(4)), 60, 8);
            assert_eq!(lines.lines().count(), if n == 0 { 0 } else { 10 });
            assert!(lines.lines().all(|l| l.chars().count() < 110));
        }
        let odd = [(1.0, f64::NAN), (2.0, f64::INFINITY), (3.0, 0.0)];
        assert!(svg(&odd, &odd).is_ok());
        characters(&odd, &odd, 60, 8);
    }

    #[test]
    fn a_falling_loss_falls_on_the_screen() {
        let lines = characters(&curve(100), &[], 60, 8);
        let column = |row: usize| lines.lines().nth(row).unwrap().split_once('|').unwrap().1.find('.');
        assert!(column(0).unwrap() < column(7).unwrap(), "{lines}");
    }
}
