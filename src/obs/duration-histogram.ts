import { Histogram, type HistogramConfiguration } from 'prom-client';

/** Counts durations of one kind. */
export interface DurationCounter {
  /** Counts one duration; milliseconds. */
  observe(milliseconds: number): void;
}

/** Counts of one set of labels. */
class Child implements DurationCounter {
  readonly labels: Readonly<Record<string, string>>;
  /** One for each bound, and one for what is longer than the last. */
  readonly counts: Float64Array;
  readonly #bounds: Float64Array;
  seconds = 0;

  constructor(labels: Readonly<Record<string, string>>, bounds: Float64Array) {
    this.labels = labels;
    this.#bounds = bounds;
    this.counts = new Float64Array(bounds.length + 1);
  }

  observe(milliseconds: number): void {
    const seconds = milliseconds / 1000;
    const bounds = this.#bounds;
    let low = 0;
    let high = bounds.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (seconds <= (bounds[middle] ?? 0)) high = middle;
      else low = middle + 1;
    }
    this.counts[low] = (this.counts[low] ?? 0) + 1;
    this.seconds += seconds;
  }
}

interface ExposedValue {
  readonly metricName: string;
  readonly labels: Record<string, string | number>;
  readonly value: number;
}

/**
 * A histogram of prom-client whose counts are numbers of its own: what prom-client does with the labels at each observation
 * costs more than what is counted for each piece of a stream. Who observes often keeps the child.
 */
export class DurationHistogram<Label extends string> extends Histogram<Label> {
  readonly #name: string;
  readonly #help: string;
  readonly #bounds: Float64Array;
  readonly #labelNames: readonly Label[];
  readonly #children = new Map<string, Child>();

  /** The buckets of the configuration are seconds. */
  constructor(
    configuration: HistogramConfiguration<Label> & { readonly labelNames: Label[]; readonly buckets: number[] },
  ) {
    super(configuration);
    this.#name = configuration.name;
    this.#help = configuration.help;
    this.#labelNames = configuration.labelNames;
    this.#bounds = Float64Array.from(configuration.buckets);
    if (this.#labelNames.length === 0) this.child();
  }

  /** Counts for these values of the labels, in their order; the same object each time. */
  child(...values: readonly string[]): DurationCounter {
    const key = values.length === 1 ? (values[0] ?? '') : values.join('\n');
    const known = this.#children.get(key);
    if (known !== undefined) return known;
    const labels = Object.fromEntries(this.#labelNames.map((name, index) => [name, values[index] ?? '']));
    const child = new Child(labels, this.#bounds);
    this.#children.set(key, child);
    return child;
  }

  /** What prom-client asks for when it writes the text format. */
  async getForPromString() {
    const values = [...this.#children.values()].flatMap((child) => this.#exposed(child));
    return { name: this.#name, help: this.#help, type: 'histogram', values };
  }

  #exposed({ labels, counts, seconds }: Child): readonly ExposedValue[] {
    let sum = 0;
    const buckets = Array.from(counts, (count, index): ExposedValue => {
      sum += count;
      const le = this.#bounds[index] ?? '+Inf';
      return { metricName: `${this.#name}_bucket`, labels: { le, ...labels }, value: sum };
    });
    return [
      ...buckets,
      { metricName: `${this.#name}_sum`, labels: { ...labels }, value: seconds },
      { metricName: `${this.#name}_count`, labels: { ...labels }, value: sum },
    ];
  }
}
