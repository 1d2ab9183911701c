;;;; Calls: clients submit requests, services reply.

(in-package #:pelton)

(define-handle client (;; Replies that were taken, and not delivered because an interrupt unwound: lists of call,
                       ;; outcome, code and octets.
                       (undelivered '() :type list))
  "Submits requests to a service: OPEN-CLIENT. One thread at a time uses it.")

(define-handle service ()
  "Receives the requests of its clients: OPEN-SERVICE, SERVE. Any thread may use STOP and DRAIN.")

(define-figures client)
(define-figures service)

(define-condition call-failed (pelton-error)
  ((number :initarg :number :reader call-failed-code)
   (octets :initarg :octets :reader call-failed-octets))
  (:documentation "The service failed the call, with a code and bytes of its own: CALL-FAILED-CODE, CALL-FAILED-OCTETS.
SERVE does so with 1 and the text of the error that its handler signalled.")
  (:report (lambda (condition stream)
             (format stream "pelton: the service failed the call with ~d: ~a" (call-failed-code condition)
                     (handler-case (sb-ext:octets-to-string (call-failed-octets condition) :external-format :utf-8)
                       (error () (call-failed-octets condition)))))))

(setf (documentation 'call-failed-code 'function) "The service's own code of a CALL-FAILED, an integer."
      (documentation 'call-failed-octets 'function) "The service's own bytes of a CALL-FAILED.")

(define-condition call-abandoned (pelton-error) ()
  (:documentation "The service ended the call without a reply.")
  (:report "pelton: the service ended the call without a reply"))

;;; ---- Clients

(defun open-client (name &key timeout wait capacity message-bytes-max resident-bytes-max memory-bytes-max call-bytes-max
                           (busy-poll nil busy-poll-p) uids)
  "Opens a client of the service that listens under NAME, \"lengths\" or \"unix:PATH\". With a short name it spreads its
calls over all processes that listen under it.
:TIMEOUT seconds to wait for a service; NIL does not wait. :CALL-BYTES-MAX bytes of the largest reply, or part of one,
64 MiB.
:BUSY-POLL seconds of the longest busy-poll for a reply, 0.00005; NIL does not busy-poll. Others as OPEN-SENDER.
Interrupts are served while it waits. Signals TIMED-OUT with the restart WAIT-LONGER, NO-LISTENER-ERROR, REFUSED-ERROR,
NAME-ERROR, OPTION-ERROR and others.

    (pelton:with-client (client \"lengths\" :timeout 10)
      (pelton:call client octets :timeout 1))"
  (let ((poll-ns (cond (busy-poll (seconds-to-ns busy-poll))
                       (busy-poll-p +no-poll+))))
    (opening-in-steps (client name timeout %make-client :spins (eq wait :spin))
                      (options client-options wait capacity message-bytes-max resident-bytes-max memory-bytes-max
                               call-bytes-max poll-ns uids))))

(defmacro with-client ((client name &rest options) &body body)
  "Runs BODY with the client that OPEN-CLIENT returns, and closes it however BODY is left: calls in flight are
cancelled."
  `(with-handle (,client (open-client ,name ,@options)) ,@body))

(defconstant +traced-bytes+ 32 "What a request with a traceparent has more: spec/call.md.")

(defun submit-octets (client octets start end timeout flags traceparent out)
  "Submits a request with FLAGS, whose number is written to OUT; or a notification, if FLAGS is NIL. TRACEPARENT may be
NIL."
  (declare (type client client) (type (or null (unsigned-byte 32)) flags))
  (let ((handle (handle-address client)))
    ;; A handle that only the caller refers to must not become garbage meanwhile.
    (with-pinned-objects (client)
      (with-octets-at (sap size) (octets start end)
        (persisting (:what "submit")
          (attempt-waiting (client handle timeout deadline :spins (handle-spins client))
            (let ((no-space (if (eql deadline +no-wait+)
                                +ok+
                                (wait-for-space handle (if traceparent (+ size +traced-bytes+) size) flags deadline))))
              ;; Without a deadline, which the service would get as the call's.
              (cond ((not (eql no-space +ok+)) no-space)
                    (traceparent (%client-submit-traced handle sap size traceparent flags +no-wait+ out))
                    (flags (%client-submit handle sap size flags +no-wait+ out))
                    (t (%client-notify handle sap size +no-wait+))))))))))

(defun wait-for-space (client size flags deadline)
  "Waits for space for a request as the library does, which takes completions meanwhile: the service may wait for that
itself. Returns 0, or a code that the next attempt would not report."
  (with-words (out 1)
    (let ((code (%client-reserve client size deadline out)))
      (when (eql code +too-large+)
        ;; Too large to be reserved, not to be copied: that only needs space to begin.
        (setf code (%client-reserve client 0 deadline out)))
      (cond ((eql code +ok+) (%client-abort client))
            ;; A notification does not count as a call.
            ((or (eql code +again+) (and (null flags) (eql code +refused+))) +ok+)
            (t code)))))

(defun submit (client octets &key (start 0) end timeout idempotent traceparent)
  "Submits the bytes of OCTETS from START to END as a request, and does not await the reply. Returns the call's number,
for AWAIT and CANCEL. Waits for free space, and while 1,024 calls are in flight, up to TIMEOUT seconds; replies that
come meanwhile are kept. :IDEMPOTENT T: the call may be carried out twice; if its service ends, another process of the
name gets it. :TRACEPARENT is the header of W3C Trace Context with the span of which the call is a part, a string, for
REQUEST-TRACEPARENT; one that is not valid is as none. Signals TIMED-OUT, TOO-LARGE-ERROR; REFUSED-ERROR: so many
replies wait to be taken that waiting is without effect; then nothing was submitted. An interrupt that unwinds may
leave it submitted. Restarts: WAIT-LONGER; DROP-MESSAGE, which returns NIL.

    (let ((call (pelton:submit client octets)))
      (pelton:await client :call call :timeout 1))"
  (with-words (out 1)
    (and (submit-octets client octets start end timeout (if idempotent +idempotent+ 0) traceparent out)
         (sap-ref-64 out 0))))

(defun notify (client octets &key (start 0) end timeout)
  "Sends the service a message that it does not reply to. Returns true. Otherwise as SUBMIT."
  (with-words (out 1)
    (and (submit-octets client octets start end timeout nil nil out) t)))

(defun cancel (client call)
  "Cancels a call: its replies are dropped. Does not wait. Returns NIL if it is not in flight."
  (declare (type client client))
  (with-pinned-objects (client)
    (eql (check (attempt (%client-cancel (handle-address client) call))) +ok+)))

(declaim (inline await-completion))
(defun await-completion (client call deadline at)
  "Writes the next completion of CALL, 0 for any, to AT. Returns the code."
  (declare (type word client call) (type (unsigned-byte 62) at) (type (signed-byte 64) deadline))
  (if (zerop call)
      (%client-await client deadline (int-sap at))
      (%client-await-call client call deadline (int-sap at))))

(defun next-completion (client call at timeout tried)
  "As AWAIT-COMPLETION, but waits and signals. TRIED is the first result."
  (declare (type client client) (type (unsigned-byte 62) at))
  (let ((handle (handle-address client)))
    (persisting ()
      (attempt-waiting (client handle timeout deadline :spins (handle-spins client) :tried tried)
        (await-completion handle call deadline at)))))

(defun keep-completion (client sap)
  "Keeps the completion at SAP, which is then released, for the next AWAIT."
  (declare (type client client))
  (setf (client-undelivered client)
        (append (client-undelivered client)
                (list (list (completion.call sap) (completion.outcome sap) (completion.code sap)
                            (sap-octets (int-sap (completion.data sap)) (ldb (byte 62 0) (completion.size sap))))))))

(defun undelivered-completion (client call)
  "Takes the completion of CALL, 0 for any, that was taken and not delivered, or returns NIL."
  (when (client-undelivered client)
    (without-interrupts
      (let ((found (if (eql call 0) (first (client-undelivered client)) (assoc call (client-undelivered client)))))
        (setf (client-undelivered client) (remove found (client-undelivered client) :test #'eq))
        found))))

(defun outcome (outcome code octets)
  "Returns :REPLY, :PART or :END, or signals another outcome. OCTETS is a function that returns its bytes."
  (declare (type function octets) (dynamic-extent octets))
  (ecase outcome
    (#.+reply+ :reply)
    (#.+part+ :part)
    (#.+end+ :end)
    (#.+failed+ (error 'call-failed :code 0 :number code :octets (funcall octets)))
    (#.+abandoned+ (error 'call-abandoned :code 0))
    (#.+lost+ (let ((code (- code (ash 1 32))))
                (error (gethash code *conditions* 'pelton-error)
                       :code code
                       :detail (if (eql code +again+)
                                   "the service did not begin the call: it may be submitted again"
                                   "it is unknown whether the service carried out the call"))))))

(defmacro with-completion (((sap size outcome number) client call &key timeout) &body body)
  "Runs BODY with the next completion of CALL, 0 for any, in place; however BODY is left, it is released. A completion
that an interrupt keeps from BODY is kept."
  (let ((at (gensym "AT")) (of (gensym "CLIENT")) (wanted (gensym "CALL")) (delivered (gensym "DELIVERED"))
        (kept (gensym "KEPT")) (tried (gensym "TRIED")))
    `(let* ((,of ,client) (,wanted ,call) (,delivered nil) (,tried nil) (,kept (undelivered-completion ,of ,wanted)))
       (flet ((deliver (,sap ,size ,outcome ,number)
                (declare (ignorable ,sap ,size ,outcome ,number))
                ,@body))
         (if ,kept
             (destructuring-bind (number outcome code octets) ,kept
               (with-octets-at (sap size) (octets 0 nil)
                 (deliver sap size (outcome outcome code (lambda () octets)) number)))
             (guarding (,at ,(/ +sizeof-completion+ 8))
                 (progn
                   (setf ,tried (result (await-completion (handle-address ,of) ,wanted +no-wait+ ,at)))
                   (interruptible
                     (unless (eql ,tried +ok+) (next-completion ,of ,wanted ,at ,timeout ,tried))
                     (setf ,delivered t)
                     (let* ((completion (int-sap ,at))
                            (sap (int-sap (completion.data completion)))
                            (size (ldb (byte 62 0) (completion.size completion))))
                       (deliver sap size
                                (outcome (completion.outcome completion) (completion.code completion)
                                         (lambda () (sap-octets sap size)))
                                (completion.call completion)))))
               (unless (zerop (completion.data (int-sap ,at)))
                 (unless ,delivered (keep-completion ,of (int-sap ,at)))
                 (%client-release (handle-address ,of)))))))))

(defun await (client &key (call 0) timeout)
  "Takes the next reply to CALL, or to any call: a fresh vector of its bytes. The other values are :REPLY; :PART, more
parts follow; or :END, the end of parts, without bytes; and the call's number. Waits up to TIMEOUT seconds; interrupts
are served. Signals TIMED-OUT with the restart WAIT-LONGER; CALL-FAILED; CALL-ABANDONED; PEER-DIED-ERROR or
CLOSED-ERROR: the service has ended, and it is unknown whether it carried out the call; REFUSED-ERROR: no such call is
in flight."
  (with-completion ((sap size outcome number) client call :timeout timeout)
    (values (sap-octets sap size) outcome number)))

(defmacro calling ((call replied client octets timeout traceparent) &body body)
  "Submits a request, and runs BODY with its number. It is cancelled when BODY is left unless BODY has set REPLIED.
DROP-MESSAGE: NIL."
  (let ((at (gensym "AT")))
    `(let ((,replied nil))
       (guarding (,at 1)
           (interruptible
             (when (submit-octets ,client ,octets 0 nil ,timeout 0 ,traceparent (int-sap ,at))
               (let ((,call (sap-ref-64 (int-sap ,at) 0))) ,@body)))
         (unless (or ,replied (zerop (sap-ref-64 (int-sap ,at) 0)))
           ;; Its error is not signalled: the condition that unwinds says more.
           (undelivered-completion ,client (sap-ref-64 (int-sap ,at) 0))
           (%client-cancel (handle-address ,client) (sap-ref-64 (int-sap ,at) 0)))))))

(defmacro with-call (((sap size) client octets &key timeout traceparent) &body body)
  "Calls, and runs BODY with SAP at the SIZE bytes of the reply in the lane, which is released however BODY is left. Of
a reply in parts that is the first part; the call is then cancelled. Returns the values of BODY. Waits and signals as
CALL."
  (let ((of (gensym "CLIENT")) (call (gensym "CALL")) (seconds (gensym "TIMEOUT")) (outcome (gensym)) (number (gensym))
        (replied (gensym "REPLIED")))
    `(let ((,of ,client) (,seconds ,timeout))
       (calling (,call ,replied ,of ,octets ,seconds ,traceparent)
         (with-completion ((,sap ,size ,outcome ,number) ,of ,call :timeout ,seconds)
           (setf ,replied (not (eq ,outcome :part)))
           ,@body)))))

(defun call (client octets &key timeout traceparent)
  "Submits a request and returns the reply, a fresh vector of its bytes; of a reply in parts all of them, without a
limit of their sum. Waits up to TIMEOUT seconds for free space, and as long for each part; interrupts are served. A call
that is left before its reply is cancelled. :TRACEPARENT and conditions as SUBMIT and AWAIT.

    (pelton:call client octets :traceparent \"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\")"
  (let ((parts '()))
    (calling (number replied client octets timeout traceparent)
      (loop
        (multiple-value-bind (octets outcome) (await client :call number :timeout timeout)
          (push octets parts)
          (unless (eq outcome :part)
            (setf replied t)
            (return (if (rest parts) (joined (nreverse parts)) octets))))))))

(defun joined (parts)
  "One vector of the bytes of several."
  (let ((all (make-octets (loop for part in parts sum (length (the octets part))))) (at 0))
    (declare (type (unsigned-byte 62) at))
    (dolist (part parts all)
      (replace all (the octets part) :start1 at)
      (incf at (length (the octets part))))))

;;; ---- Services

(defun open-service (name &key wait capacity message-bytes-max resident-bytes-max memory-bytes-max call-bytes-max uids
                            clients-max)
  "Opens a service that listens under NAME, \"lengths\" or \"unix:PATH\". Several processes may listen under one short
name. Does not wait: SERVE accepts clients.
:CLIENTS-MAX clients at a time, 1,024. :CALL-BYTES-MAX bytes of the largest request, 64 MiB. :MEMORY-BYTES-MAX is of all
clients together. Others as OPEN-SENDER. Signals IN-USE-ERROR, NAME-ERROR, OPTION-ERROR, SYSTEM-ERROR."
  (check (with-options (options service-options wait capacity message-bytes-max resident-bytes-max memory-bytes-max
                                call-bytes-max uids clients-max)
           (opening (out %make-service :spins (eq wait :spin)) (%service-open name options out)))))

(defmacro with-service ((service name &rest options) &body body)
  "Runs BODY with the service that OPEN-SERVICE returns, and closes it however BODY is left: calls in flight fail at
their clients."
  `(with-handle (,service (open-service ,name ,@options)) ,@body))

(defstruct (request (:copier nil) (:predicate nil) (:constructor make-request ()))
  "A client's request: the argument of a handler, valid until that returns; its bytes stay valid."
  ;; 0: a notification, or it has its reply.
  (responder 0 :type word)
  ;; It was received.
  (received nil)
  (octets (make-octets 0) :type octets)
  (pid 0 :type (unsigned-byte 32))
  (uid 0 :type (unsigned-byte 32)))

(setf (documentation 'request-octets 'function) "The bytes of a REQUEST: a copy, which the caller may keep."
      (documentation 'request-pid 'function) "The client's process of a REQUEST, as the kernel reports it."
      (documentation 'request-uid 'function) "The client's user of a REQUEST, as the kernel reports it.")

(defmacro replying ((request) call)
  "Makes CALL, the last reply to REQUEST, which closes its responder, except with these conditions."
  (let ((result (gensym "RESULT")))
    `(check (without-interrupts
              (let ((,result (result ,call)))
                (unless (typep ,result '(or too-large-error reserved-error not-reserved-error forked-error
                                         internal-error null-error wrong-thread-error))
                  (setf (request-responder ,request) 0))
                ,result)))))

(defun reply (request octets &key (start 0) end)
  "Replies to REQUEST with the bytes of OCTETS from START to END, and ends the call; after parts this is the last one.
Does not wait: it is stored while the client's lane has no space. Signals a CHANNEL-ENDED: the client has gone, and the
reply is dropped; TOO-LARGE-ERROR for this client."
  (declare (type request request))
  (with-octets-at (sap size) (octets start end)
    (replying (request) (%responder-reply (request-responder request) sap size)))
  (values))

(defun fail (request code &optional (octets (make-octets 0)))
  "Fails the call with a code, below 4294901760, and bytes that the service chooses: its client gets CALL-FAILED.
Otherwise as REPLY."
  (declare (type request request))
  (with-octets-at (sap size) (octets 0 nil)
    (replying (request) (%responder-fail (request-responder request) code sap size)))
  (values))

(defun reply-part (request octets &key (start 0) end timeout)
  "Sends a part of the reply; REPLY sends the last one, or END-REPLY ends the reply after the last one. Waits for free
space, up to TIMEOUT seconds; an interrupt is served within 50 ms. Signals TIMED-OUT with the restart WAIT-LONGER;
others as REPLY."
  (declare (type request request))
  (with-octets-at (sap size) (octets start end)
    (persisting ()
      (attempt-waiting (nil nil timeout deadline)
        (%responder-part (request-responder request) sap size deadline))))
  (values))

(defun end-reply (request)
  "Ends a call whose reply came in parts, or has none. Otherwise as REPLY."
  (declare (type request request))
  (replying (request) (%responder-end (request-responder request)))
  (values))

(defun request-traceparent (request)
  "Returns the header traceparent of W3C Trace Context with which the client has submitted the REQUEST, a string: its
span is the parent of this service's. NIL if it came without a valid one, if it is a notification, and after the
reply. Does not wait."
  (declare (type request request))
  (unless (zerop (request-responder request))
    (traceparent-by #'%responder-traceparent (request-responder request))))

(defun request-cancelled-p (request)
  "Returns true if the client has cancelled the call, or has gone. It still needs a reply: choose the cheapest. Does not
wait."
  (declare (type request request))
  (eql (check (attempt (%responder-is-cancelled (request-responder request)))) 1))

(defun next-request (service request)
  "Receives the next request into REQUEST. Returns true, or NIL if the service was stopped."
  (declare (type request request))
  (let ((handle (handle-address service)))
    (with-structure (out request)
      (flet ((take (deadline)
               (without-interrupts
                 (let ((result (result (%service-receive handle deadline out))))
                   (when (eql result +ok+)
                     (setf (request-responder request) (request.responder out)
                           (request-pid request) (request.pid out)
                           (request-uid request) (request.uid out)
                           (request-received request) t)
                     ;; The heap may have no space for them.
                     (unwind-protect
                          (setf (request-octets request)
                                (sap-octets (int-sap (request.data out)) (ldb (byte 62 0) (request.size out))))
                       (%service-release handle)))
                   result)))
             (ready (deadline)
               (wait-until-ready (service handle (handle-spins service) deadline) attempt)))
        (let ((result (wait-for nil #'take #'ready)))
          (etypecase result
            ((eql #.+ok+) t)
            (closed-error nil)
            (pelton-error (error result))))))))

(defun end-call (request)
  "Ends the call if it has no reply. Only without interrupts."
  (unless (zerop (request-responder request))
    (attempt (%close (request-responder request)))
    (setf (request-responder request) 0)))

(defun text-of (condition)
  (sb-ext:string-to-octets (handler-case (princ-to-string condition)
                             (error () (format nil "a ~a, which cannot be printed" (type-of condition))))
                           :external-format :utf-8))

(defun handle-request (handler request)
  (handler-case
      (let ((reply (funcall handler request)))
        (when (and (typep reply '(vector (unsigned-byte 8))) (plusp (request-responder request)))
          (reply request reply)))
    (error (condition)
      (when (plusp (request-responder request))
        (handler-case (fail request 1 (text-of condition))
          ;; The client has gone.
          (pelton-error ()))))))

(defvar *receiving* nil "The request that this thread of SERVE is receiving into.")

(defun serve (service handler &key (threads 1))
  "Calls HANDLER with each REQUEST, on THREADS threads, of which the caller is one, until STOP or DRAIN; then waits for
the handlers in progress. A vector of bytes that HANDLER returns is the reply, unless it has called REPLY, END-REPLY or
FAIL. If it signals an error, the call fails with 1 and the error's text. If it ends otherwise without a reply, the
client gets CALL-ABANDONED. It also gets notifications, which need no reply. Interrupts are served.
Signals SYSTEM-ERROR, for instance if no descriptor is free, and a serious condition that is no error and that has left
a handler, for instance an exhausted stack. It can be called again after that, and after an interrupt that unwinds.

    (pelton:with-service (service \"upcase\")
      (pelton:serve service (lambda (request) (reverse (pelton:request-octets request))) :threads 2))"
  (declare (type service service))
  (let ((handler (coerce handler 'function)) (lock (sb-thread:make-mutex :name "pelton service"))
        (ended nil) (failure nil) (all '()))
    (labels ((take (request)
               (let ((*receiving* request))
                 (catch 'ended
                   ;; From here on END wakes this thread; before, it sees ENDED.
                   (unless ended
                     (or (sb-thread:with-mutex (lock)
                           (and (not ended) (next-request service request)))
                         (progn (setf ended t) nil))))))
             (work ()
               (loop
                 (let ((request (make-request)))
                   (without-interrupts
                     (unwind-protect
                          (with-local-interrupts
                            (unless (take request) (return))
                            (handle-request handler request))
                       (end-call request))))))
             (end ()
               (setf ended t)
               (dolist (thread all)
                 (unless (eq thread sb-thread:*current-thread*)
                   (handler-case
                       (sb-thread:interrupt-thread thread (lambda ()
                                                            (when (and *receiving* (not (request-received *receiving*)))
                                                              (throw 'ended nil))))
                     ;; The thread has ended.
                     (sb-thread:interrupt-thread-error ())))))
             (work-apart ()
               (handler-case (work)
                 (serious-condition (condition)
                   (setf failure condition)
                   (end)))))
      (without-interrupts
        (unwind-protect
             (with-local-interrupts
               (push sb-thread:*current-thread* all)
               (loop repeat (1- threads)
                     do (without-interrupts (push (sb-thread:make-thread #'work-apart :name "pelton service") all)))
               (work))
          (end)
          (dolist (thread all)
            (unless (eq thread sb-thread:*current-thread*)
              (with-local-interrupts (sb-thread:join-thread thread :default nil))))))
      (when failure (error failure))))
  (values))

(defun stop (service)
  "Ends a service: SERVE returns after the handlers in progress. Does not wait. Any thread, also a handler."
  (declare (type service service))
  (check (attempt (%service-stop (handle-address service))))
  (values))

(defun drain (service)
  "Drains a service: requests that were received get their replies. Later ones go back to their clients, which submit
them to another process of the name, so no call fails or is carried out twice. Then SERVE returns. Does not wait. Any
thread, also a handler."
  (declare (type service service))
  (check (attempt (%service-drain (handle-address service))))
  (values))
