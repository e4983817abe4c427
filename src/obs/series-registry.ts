import { Counter, Gauge, Registry } from 'prom-client';
import { DurationHistogram } from './duration-histogram.ts';
import { type LabelOf, type SeriesName, type SeriesOf, seriesSpec } from './series.ts';

/** Makes the series of one process as `series.ts` describes them, and writes them down; `collect` is called at each scrape. */
export class SeriesRegistry {
  readonly #registry = new Registry();

  /** Content type of what {@link render} returns. */
  get contentType(): string {
    return this.#registry.contentType;
  }

  /** All series in the Prometheus text format. */
  render(): Promise<string> {
    return this.#registry.metrics();
  }

  counter<Name extends SeriesOf<'counter'>>(name: Name, collect?: (counter: Counter<LabelOf<Name>>) => void) {
    return new Counter<LabelOf<Name>>({
      ...describe(name),
      registers: [this.#registry],
      ...(collect === undefined
        ? {}
        : {
            collect() {
              collect(this);
            },
          }),
    });
  }

  gauge<Name extends SeriesOf<'gauge'>>(name: Name, collect?: (gauge: Gauge<LabelOf<Name>>) => void | Promise<void>) {
    return new Gauge<LabelOf<Name>>({
      ...describe(name),
      registers: [this.#registry],
      ...(collect === undefined
        ? {}
        : {
            collect() {
              return collect(this);
            },
          }),
    });
  }

  histogram<Name extends SeriesOf<'histogram'>>(name: Name) {
    return new DurationHistogram<LabelOf<Name>>({
      ...describe(name),
      buckets: [...(seriesSpec(name).buckets ?? [])],
      registers: [this.#registry],
    });
  }
}

function describe<Name extends SeriesName>(name: Name): { name: Name; help: string; labelNames: LabelOf<Name>[] } {
  const { help, labels } = seriesSpec(name);
  return { name, help, labelNames: [...labels] as LabelOf<Name>[] };
}
