import { Code, ConnectError, type HandlerContext, type ServiceImpl } from '@connectrpc/connect';
import {
  type Health,
  type HealthCheckRequest,
  HealthCheckResponse_ServingStatus as Status,
} from '../../gen/grpc/health/v1/health_pb.ts';

/** The health service of gRPC: services are SERVING until the process drains. */
export class HealthService implements ServiceImpl<typeof Health> {
  readonly #services: ReadonlySet<string>;
  readonly #drain: AbortSignal;

  /** `services` are the full names of what is served; `drain` aborts with a ConnectError, which also ends watches. */
  constructor(services: Iterable<string>, drain: AbortSignal) {
    // The empty name asks for the process as a whole.
    this.#services = new Set(['', ...services]);
    this.#drain = drain;
  }

  get #status(): Status {
    return this.#drain.aborted ? Status.NOT_SERVING : Status.SERVING;
  }

  check({ service }: HealthCheckRequest) {
    if (!this.#services.has(service)) throw new ConnectError('this process does not serve that', Code.NotFound);
    return { status: this.#status };
  }

  list() {
    return { statuses: Object.fromEntries([...this.#services].map((name) => [name, { status: this.#status }])) };
  }

  async *watch({ service }: HealthCheckRequest, { signal }: Pick<HandlerContext, 'signal'>) {
    const known = this.#services.has(service);
    if (!this.#drain.aborted) {
      yield { status: known ? Status.SERVING : Status.SERVICE_UNKNOWN };
      await eitherAborts(this.#drain, signal);
    }
    if (known) yield { status: Status.NOT_SERVING };
    throw ConnectError.from(this.#drain.aborted ? this.#drain.reason : signal.reason);
  }
}

function eitherAborts(...signals: readonly AbortSignal[]): Promise<void> {
  return new Promise((resolve) => {
    const done = () => {
      for (const signal of signals) signal.removeEventListener('abort', done);
      resolve();
    };
    for (const signal of signals) signal.addEventListener('abort', done);
    if (signals.some(({ aborted }) => aborted)) done();
  });
}
