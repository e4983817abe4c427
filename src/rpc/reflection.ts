import { type DescFile, type DescMessage, toBinary } from '@bufbuild/protobuf';
import { FileDescriptorProtoSchema } from '@bufbuild/protobuf/wkt';
import { Code, type ConnectRouter, type HandlerContext } from '@connectrpc/connect';
import { file_baton_v1_error_reason } from '../../gen/baton/v1/error_reason_pb.ts';
import { file_google_rpc_error_details } from '../../gen/google/rpc/error_details_pb.ts';
import { Health } from '../../gen/grpc/health/v1/health_pb.ts';
import { ServerReflection, type ServerReflectionRequest } from '../../gen/grpc/reflection/v1/reflection_pb.ts';
import {
  type ServerReflectionRequest as AlphaRequest,
  ServerReflection as ServerReflectionAlpha,
} from '../../gen/grpc/reflection/v1alpha/reflection_pb.ts';
import { untilAborted } from './bind.ts';
import { BATON_SERVICES } from './routes.ts';

/** Mounts server reflection in both versions; `services` are the full names that it lists beside its own. */
export function mountReflection(router: ConnectRouter, services: readonly string[], streamStop: AbortSignal): void {
  const reflection = new Reflection([...services, Health.typeName, ServerReflection.typeName]);
  const options = { shutdownSignal: streamStop };
  router.rpc(
    ServerReflection.method.serverReflectionInfo,
    (requests, context) => reflection.serve(requests, context),
    options,
  );
  const alpha = ServerReflectionAlpha.method.serverReflectionInfo;
  router.rpc(alpha, (requests, context) => reflection.serve(requests, context), options);
}

type Question = Pick<ServerReflectionRequest | AlphaRequest, 'host' | 'messageRequest'>;

/** Answers from the descriptors of the generated code. */
class Reflection {
  readonly #services: readonly string[];
  readonly #files = new Map<string, DescFile>();
  /** Files by the full names of what they declare. */
  readonly #symbols = new Map<string, DescFile>();

  constructor(services: readonly string[]) {
    this.#services = services;
    const known = [...BATON_SERVICES, Health, ServerReflection, ServerReflectionAlpha].map(({ file }) => file);
    for (const file of [...known, file_baton_v1_error_reason, file_google_rpc_error_details]) this.#add(file);
  }

  /** One answer to each question of a stream; a file is sent once on it. */
  async *serve<T extends Question>(questions: AsyncIterable<T>, { signal }: Pick<HandlerContext, 'signal'>) {
    const sent = new Set<string>();
    for await (const question of untilAborted(questions, signal)) {
      yield { validHost: question.host, originalRequest: question, messageResponse: this.#answer(question, sent) };
    }
  }

  #answer({ messageRequest }: Question, sent: Set<string>) {
    switch (messageRequest.case) {
      case 'listServices':
        return {
          case: 'listServicesResponse' as const,
          value: { service: this.#services.map((name) => ({ name })) },
        };
      case 'fileByFilename':
        return filesOf(this.#files.get(messageRequest.value), sent);
      case 'fileContainingSymbol':
        return filesOf(this.#symbols.get(messageRequest.value), sent);
      case 'fileContainingExtension':
        // None of the contracts extends anything.
        return failure(Code.NotFound, 'no such extension');
      case 'allExtensionNumbersOfType':
        return this.#symbols.has(messageRequest.value)
          ? { case: 'allExtensionNumbersResponse' as const, value: { baseTypeName: messageRequest.value } }
          : failure(Code.NotFound, 'no such type');
      default:
        return failure(Code.InvalidArgument, 'the request asks for nothing that is known here');
    }
  }

  #add(file: DescFile): void {
    if (this.#files.has(file.proto.name)) return;
    this.#files.set(file.proto.name, file);
    for (const dependency of file.dependencies) this.#add(dependency);
    for (const message of file.messages) this.#addMessage(message, file);
    for (const { typeName } of [...file.enums, ...file.extensions]) this.#symbols.set(typeName, file);
    for (const { typeName, methods } of file.services) {
      this.#symbols.set(typeName, file);
      for (const { name } of methods) this.#symbols.set(`${typeName}.${name}`, file);
    }
  }

  #addMessage(message: DescMessage, file: DescFile): void {
    this.#symbols.set(message.typeName, file);
    for (const { typeName } of [...message.nestedEnums, ...message.nestedExtensions]) this.#symbols.set(typeName, file);
    for (const nested of message.nestedMessages) this.#addMessage(nested, file);
  }
}

/** A file, and after it what it imports and was not sent before on the stream. */
function filesOf(file: DescFile | undefined, sent: Set<string>) {
  if (file === undefined) return failure(Code.NotFound, 'no such file or symbol');
  const fresh: DescFile[] = [];
  const visit = (next: DescFile) => {
    if (sent.has(next.proto.name)) return;
    sent.add(next.proto.name);
    for (const dependency of next.dependencies) visit(dependency);
    fresh.push(next);
  };
  visit(file);
  // Clients look for the file they asked for in first place.
  const files = [file, ...fresh.filter((other) => other !== file)];
  const fileDescriptorProto = files.map(({ proto }) => toBinary(FileDescriptorProtoSchema, proto));
  return { case: 'fileDescriptorResponse' as const, value: { fileDescriptorProto } };
}

function failure(errorCode: Code, errorMessage: string) {
  return { case: 'errorResponse' as const, value: { errorCode, errorMessage } };
}
