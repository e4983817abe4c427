import { create, type DescMethod, type DescService, type Message, type MessageInitShape } from '@bufbuild/protobuf';
import type { CallOptions, Client, ServiceImpl } from '@connectrpc/connect';
import { type BoundMethod, bindService, type FaultSink, untilAborted } from './bind.ts';
import { abortErrorOf } from './errors.ts';
import { LazyContext } from './lazy-context.ts';
import { RPC_MAX_TIMEOUT_MS } from './limits.ts';
import { type CallTimer, timeMethod } from './time-calls.ts';

/**
 * Binds the client type of a service to an implementation in this process, without serialisation. It behaves as a
 * remote client does: abort, `timeoutMs` (0 is none), error mapping, UNIMPLEMENTED. Messages are shared and not copied, so both
 * sides treat them as read-only. A server stream starts with its first read. `onCall` is told of each call with a single answer.
 */
export function createDirectClient<Desc extends DescService>(
  service: Desc,
  impl: Partial<ServiceImpl<Desc>>,
  onFault: FaultSink = () => undefined,
  onCall?: CallTimer,
): Client<Desc> {
  const methods: Record<string, unknown> = {};
  for (const plain of bindService(service, impl, onFault)) {
    const bound = onCall === undefined ? plain : timeMethod(plain, onCall);
    methods[bound.method.localName] =
      bound.kind === 'unary'
        ? (input: MessageInitShape<typeof bound.method.input>, options?: CallOptions) =>
            callUnary(bound, input, options)
        : (input: MessageInitShape<typeof bound.method.input>, options?: CallOptions) =>
            callStream(bound, input, options);
  }
  assertClient(service, methods);
  return methods;
}

type Input = MessageInitShape<BoundMethod['method']['input']>;
type Unary = Extract<BoundMethod, { kind: 'unary' }>;
type Streaming = Extract<BoundMethod, { kind: 'server_streaming' }>;

async function callUnary(bound: Unary, input: Input, options: CallOptions | undefined): Promise<Message> {
  const context = openCall(bound.method, options);
  try {
    const request = create(bound.method.input, input);
    const answer = Promise.resolve(bound.call(request, context));
    const output = await (context.canEndEarly ? orEarlyEnd(answer, context) : answer);
    context.reportHeaders();
    return create(bound.method.output, output);
  } finally {
    context.end();
  }
}

async function* callStream(bound: Streaming, input: Input, options: CallOptions | undefined): AsyncGenerator<Message> {
  const context = openCall(bound.method, options);
  try {
    const request = create(bound.method.input, input);
    for await (const message of untilAborted(bound.call(request, context), context.signal)) {
      yield create(bound.method.output, message);
    }
    context.reportHeaders();
  } finally {
    context.end();
  }
}

function openCall(method: DescMethod, options: CallOptions | undefined): DirectContext {
  if (options?.signal?.aborted === true) throw abortErrorOf(options.signal);
  return new DirectContext(method, options);
}

/** Settles as `answer` does, or earlier with the reason why the call ended. */
function orEarlyEnd<T>(answer: Promise<T>, context: DirectContext): Promise<T> {
  return new Promise((resolve, reject) => {
    context.onEarlyEnd = reject;
    answer.then(resolve, reject);
  });
}

class DirectContext extends LazyContext {
  readonly protocolName = 'direct';
  readonly canEndEarly: boolean;
  onEarlyEnd: ((reason: Error) => void) | undefined;
  readonly #options: CallOptions | undefined;

  constructor(method: DescMethod, options: CallOptions | undefined) {
    const timeoutMs = options?.timeoutMs ?? 0;
    const hasTimeout = timeoutMs > 0 && timeoutMs <= RPC_MAX_TIMEOUT_MS;
    super(method, hasTimeout ? timeoutMs : undefined);
    this.#options = options;
    this.canEndEarly = hasTimeout || options?.signal !== undefined;
    options?.signal?.addEventListener('abort', this.#onAbort);
    if (hasTimeout) this.watchForEnd();
  }

  get url(): string {
    return `direct:/${this.method.parent.typeName}/${this.method.name}`;
  }

  reportHeaders(): void {
    this.#options?.onHeader?.(this.responseHeader);
    this.#options?.onTrailer?.(this.responseTrailer);
  }

  override end(reason?: Error): void {
    super.end(reason);
    this.#options?.signal?.removeEventListener('abort', this.#onAbort);
    if (reason !== undefined) this.onEarlyEnd?.(reason);
  }

  protected readRequestHeader(): Headers {
    return new Headers(this.#options?.headers);
  }

  readonly #onAbort = (): void => {
    if (this.#options?.signal !== undefined) this.end(abortErrorOf(this.#options.signal));
  };
}

function assertClient<Desc extends DescService>(
  service: Desc,
  methods: Record<string, unknown>,
): asserts methods is Client<Desc> & Record<string, unknown> {
  for (const method of service.methods) {
    if (typeof methods[method.localName] !== 'function') throw new TypeError(`${method.localName} is not bound`);
  }
}
