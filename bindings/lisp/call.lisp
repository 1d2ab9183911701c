;;;; Calls: a client asks, a service answers.

(in-package #:pelton)

(define-handle client (;; Answers that were taken, and not shown, since an interrupt has unwound: lists of call, outcome, code and octets.
                       (unseen '() :type list))
  "What a service is asked by. One thread at a time uses it.")

(define-handle service ()
  "What takes the requests of its clients. STOP is for any thread.")

(define-condition call-failed (pelton-error)
  ((number :initarg :number :reader call-failed-code :documentation "The service's own code.")
   (octets :initarg :octets :reader call-failed-octets :documentation "The service's own words."))
  (:documentation "The service failed the call, with a code and bytes of its own meaning. SERVE does so with 1 and the words of what its handler
has signalled.")
  (:report (lambda (condition stream)
             (format stream "pelton: the service failed the call with ~d: ~a" (call-failed-code condition)
                     (handler-case (sb-ext:octets-to-string (call-failed-octets condition) :external-format :utf-8)
                       (error () (call-failed-octets condition)))))))

(define-condition call-abandoned (pelton-error) ()
  (:documentation "The service let go of the call without an answer.")
  (:report "pelton: the service let go of the call without an answer"))

;;; ---- Asking

(defun open-client (name &rest options &key timeout &allow-other-keys)
  "Connects to the service that listens under NAME, \"lengths\", or \"unix:PATH\". Waits up to :TIMEOUT seconds for one to listen, nil: not.
:WAIT, :CAPACITY, :MESSAGE-BYTES-MAX and :UIDS as OPEN-SENDER; :CALL-BYTES-MAX, the largest answer, 64 MiB; :HOLD, for so many seconds a wait
spins where answers have lately come so soon, 20 us, nil: not. Signals as OPEN-SENDER."
  (open-end name (without-keys options :timeout) timeout #'%make-client #'%client-open))

(defmacro with-client ((client name &rest options) &body body)
  "Runs BODY with a client of a service: OPEN-CLIENT. It is closed however BODY is left, and the calls in flight are given up."
  `(with-handle (,client (open-client ,name ,@options)) ,@body))

(defun submit-octets (client octets start end timeout flags out)
  (declare (type client client))
  (let ((handle (handle-address client)))
    ;; What the caller alone leads to must not be found forgotten meanwhile.
    (with-pinned-objects (client)
      (with-octets-at (sap size) (octets start end)
        (persisting (:what "ask")
          (attempt-waiting (handle (handle-spins client) timeout deadline)
            (let ((no-room (if (eql deadline +no-wait+) 0 (wait-for-room handle size flags deadline))))
              ;; Asks without waiting, for the service would be told how long that does.
              (if (eql no-room 0) (%submit handle sap size flags +no-wait+ out) no-room))))))))

(defun wait-for-room (client size flags deadline)
  "Waits for room to ask in as the library does, which takes in answers meanwhile: the service may wait for that itself. Answers 0, or a code that
is not for the next attempt to tell."
  (with-words (out 1)
    (let ((code (%reserve client size deadline out)))
      (when (eql code +too-large+)
        ;; For what is reserved, and not for what is copied: that needs no more room than to begin.
        (setf code (%reserve client 0 deadline out)))
      (cond ((eql code 0) (%abort client))
            ;; What is not answered needs no place among the calls.
            ((or (eql code +again+) (and (logtest flags 1) (eql code +refused+))) 0)
            (t code)))))

(defun submit (client octets &key (start 0) end timeout idempotent)
  "Asks, without awaiting: answers the call's number, for AWAIT and CANCEL. Waits for room, up to TIMEOUT seconds, nil for ever. :IDEMPOTENT true:
it may be carried out twice, so that another process of the service's name is asked if this one ends. Up to 1,024 may be in flight.
Answers that come while it waits are kept. Signals TIMED-OUT and TOO-LARGE-ERROR, and REFUSED-ERROR when so many answers wait to be taken that
waiting would not help; nothing was asked then. If an interrupt unwinds it may have been asked. Restarts: WAIT-LONGER; DROP-MESSAGE, which answers nil."
  (with-words (out 1)
    (and (submit-octets client octets start end timeout (if idempotent 2 0) out)
         (sap-ref-64 out 0))))

(defun notify (client octets &key (start 0) end timeout)
  "Tells the service something that it does not answer. As SUBMIT otherwise."
  (with-words (out 1)
    (and (submit-octets client octets start end timeout 1 out) t)))

(defun cancel (client call)
  "Gives a call up: none of its answers is taken any more. Does not wait. Nil if it is not in flight."
  (declare (type client client))
  (with-pinned-objects (client)
    (eql (check (attempt (%cancel (handle-address client) call))) 0)))

(defun next-answer (client call at timeout tried)
  "Describes the next answer to CALL, 0 for any, AT. Waits. Nothing is signalled for what the answer says. TRIED is what was answered already."
  (declare (type client client) (type (unsigned-byte 62) at))
  (let ((handle (handle-address client)))
    (persisting ()
      (attempt-waiting (handle (handle-spins client) timeout deadline :tried tried)
        (%await handle call deadline (int-sap at))))))

(defun keep-answer (client at)
  "What is described AT, and released then, is for who awaits it next."
  (declare (type client client))
  (setf (client-unseen client)
        (append (client-unseen client)
                (list (list (word-at at 0) (ldb (byte 32 0) (word-at at 24)) (ldb (byte 32 32) (word-at at 24))
                            (sap-octets (sap-at at 8) (ldb (byte 62 0) (word-at at 16))))))))

(defun unseen-answer (client call)
  "The answer to CALL, 0 for any, that was taken and not shown, or nil."
  (when (client-unseen client)
    (without-interrupts
      (let ((found (if (eql call 0) (first (client-unseen client)) (assoc call (client-unseen client)))))
        (setf (client-unseen client) (remove found (client-unseen client) :test #'eq))
        found))))

(defun outcome (outcome code octets)
  "What an answer is: :REPLY, :PART or :END. Signals what else it may be. OCTETS is a function that has its bytes."
  (declare (type function octets) (dynamic-extent octets))
  (ecase outcome
    (1 :reply)
    (2 :part)
    (3 :end)
    (4 (error 'call-failed :code 0 :number code :octets (funcall octets)))
    (5 (error 'call-abandoned :code 0))
    (6 (let ((code (- code (ash 1 32))))
         (error (gethash code *conditions* 'pelton-error)
                :code code
                :detail (if (eql code +again+)
                            "the call was not begun, and may be asked again"
                            "whether the call was carried out nobody knows"))))))

(defmacro with-answer (((sap size outcome number) client call &key timeout) &body body)
  "Runs BODY with the next answer to CALL, 0 for any, in place; however BODY is left, it is released. What an interrupt unwinds before is kept."
  (let ((at (gensym "AT")) (asked (gensym "CLIENT")) (wanted (gensym "CALL")) (shown (gensym "SHOWN")) (kept (gensym "KEPT"))
        (tried (gensym "TRIED")))
    `(let* ((,asked ,client) (,wanted ,call) (,shown nil) (,tried nil) (,kept (unseen-answer ,asked ,wanted)))
       (flet ((show (,sap ,size ,outcome ,number)
                (declare (ignorable ,sap ,size ,outcome ,number))
                ,@body))
         (if ,kept
             (destructuring-bind (number outcome code octets) ,kept
               (with-octets-at (sap size) (octets 0 nil)
                 (show sap size (outcome outcome code (lambda () octets)) number)))
             (guarding (,at 4)
                 (setf ,tried (attempt (%await (handle-address ,asked) ,wanted +no-wait+ (int-sap ,at))))
                 (progn
                   (unless (eql ,tried 0) (next-answer ,asked ,wanted ,at ,timeout ,tried))
                   (setf ,shown t)
                   (let ((sap (sap-at ,at 8)) (size (ldb (byte 62 0) (word-at ,at 16))))
                     (show sap size
                           (outcome (ldb (byte 32 0) (word-at ,at 24)) (ldb (byte 32 32) (word-at ,at 24))
                                    (lambda () (sap-octets sap size)))
                           (word-at ,at 0))))
               (unless (zerop (word-at ,at 8))
                 (unless ,shown (keep-answer ,asked ,at))
                 (attempt (%release (handle-address ,asked))))))))))

(defun await (client &key (call 0) timeout)
  "The next answer to CALL, or to any call, a fresh vector of its bytes; the other values are :REPLY, :PART, which more will follow, or :END, which
ends parts; and the call's number. Waits up to TIMEOUT seconds, nil for ever.
Signals TIMED-OUT with the restart WAIT-LONGER; CALL-FAILED; CALL-ABANDONED; PEER-DIED-ERROR or CLOSED-ERROR when the service has gone, and
nobody knows whether the call was carried out; REFUSED-ERROR when no such call is in flight."
  (with-answer ((sap size outcome number) client call :timeout timeout)
    (values (sap-octets sap size) outcome number)))

(defmacro calling ((call answered client octets timeout) &body body)
  "Asks, and runs BODY with the number of the call, which is given up when BODY is left and ANSWERED was not set to true. DROP-MESSAGE: nil."
  (let ((at (gensym "AT")))
    `(let ((,answered nil))
       (guarding (,at 1)
           nil
           (when (submit-octets ,client ,octets 0 nil ,timeout 0 (int-sap ,at))
             (let ((,call (word-at ,at 0))) ,@body))
         (unless (or ,answered (zerop (word-at ,at 0)))
           ;; Without a word if that cannot be: what is being signalled says more.
           (unseen-answer ,client (word-at ,at 0))
           (attempt (%cancel (handle-address ,client) (word-at ,at 0))))))))

(defmacro with-call (((sap size) client octets &key timeout) &body body)
  "Asks, waits for the answer, and runs BODY with its SIZE bytes in place, at SAP; then it is released, however BODY is left. If it comes in
parts this is the first of them, and the others are given up. When the wait is left without an answer the call is given up. Waits, and signals, as CALL."
  (let ((asked (gensym "CLIENT")) (call (gensym "CALL")) (seconds (gensym "TIMEOUT")) (outcome (gensym)) (number (gensym))
        (answered (gensym "ANSWERED")))
    `(let ((,asked ,client) (,seconds ,timeout))
       (calling (,call ,answered ,asked ,octets ,seconds)
         (with-answer ((,sap ,size ,outcome ,number) ,asked ,call :timeout ,seconds)
           (setf ,answered (not (eq ,outcome :part)))
           ,@body)))))

(defun call (client octets &key timeout)
  "Asks, and answers the reply, a fresh vector of its bytes; if it comes in parts, all of them, which together
no option bounds. Waits up to TIMEOUT seconds for room, and as long for
each answer, nil for ever; a call that is not awaited any more is given up.
Signals as SUBMIT and AWAIT."
  (let ((parts '()))
    (calling (number answered client octets timeout)
      (loop
        (multiple-value-bind (octets outcome) (await client :call number :timeout timeout)
          (push octets parts)
          (unless (eq outcome :part)
            (setf answered t)
            (return (if (rest parts) (joined (nreverse parts)) octets))))))))

(defun joined (parts)
  "One vector of the bytes of several."
  (let ((all (make-octets (loop for part in parts sum (length (the octets part))))) (at 0))
    (declare (type (unsigned-byte 62) at))
    (dolist (part parts all)
      (replace all (the octets part) :start1 at)
      (incf at (length (the octets part))))))

;;; ---- Answering

(defun open-service (name &rest options &key &allow-other-keys)
  "Listens for clients under NAME, \"lengths\", or \"unix:PATH\". Does not wait: they are let in while SERVE runs. Several processes may serve one
short name. :LANES is how many clients there may be, 1,024; :WAIT, :CAPACITY, :MESSAGE-BYTES-MAX and :UIDS as OPEN-SENDER;
:CALL-BYTES-MAX, the largest request, 64 MiB. Signals IN-USE-ERROR, NAME-ERROR, OPTION-ERROR, SYSTEM-ERROR."
  (check (with-options (sap options)
           (opening (out %make-service :spins (eq (getf options :wait) :spin)) (%service-listen name sap out)))))

(defmacro with-service ((service name &rest options) &body body)
  "Runs BODY with a service: OPEN-SERVICE. It is closed however BODY is left, and calls in flight fail at their clients."
  `(with-handle (,service (open-service ,name ,@options)) ,@body))

(defstruct (request (:copier nil) (:predicate nil) (:constructor make-request ()))
  "What a client asks. Good until the handler that was given it has returned, but for its bytes."
  (responder 0 :type word)
  ;; It has come.
  (taken nil)
  (octets (make-octets 0) :type octets)
  (pid 0 :type (unsigned-byte 32))
  (uid 0 :type (unsigned-byte 32)))

(setf (documentation 'request-octets 'function) "The bytes of a request: a copy, the caller's to keep.")
(setf (documentation 'request-pid 'function) "The client's process, as the kernel vouches for.")
(setf (documentation 'request-uid 'function) "The client's user, as the kernel vouches for.")

(defmacro answering ((request) call)
  "Makes CALL, the last answer to REQUEST: its responder is closed, unless the library says that it is not."
  (let ((result (gensym "RESULT")))
    `(check (without-interrupts
              (let ((,result (attempt ,call)))
                (unless (typep ,result '(or too-large-error reserved-error forked-error internal-error null-error wrong-thread-error))
                  (setf (request-responder ,request) 0))
                ,result)))))

(defun reply (request octets &key (start 0) end)
  "Answers the request; after parts this is the last of them. Does not wait: what the client has no room for is kept until it has.
Signals a CHANNEL-ENDED: the client has gone, and the answer is dropped; TOO-LARGE-ERROR for this client."
  (declare (type request request))
  (with-octets-at (sap size) (octets start end)
    (answering (request) (%reply (request-responder request) sap size)))
  (values))

(defun fail (request number &optional (octets (make-octets 0)))
  "Fails the call with a number of the service's own meaning, and words: its client is told CALL-FAILED. As REPLY."
  (declare (type request request))
  (with-octets-at (sap size) (octets 0 nil)
    (answering (request) (%reply-fail (request-responder request) number sap size)))
  (values))

(defun reply-part (request octets &key (start 0) end timeout)
  "Gives a part of the answer, of which REPLY gives the last. Waits for room, up to TIMEOUT seconds, nil for ever: interrupts are looked at 20 times a
second. Signals TIMED-OUT with the restart WAIT-LONGER; as REPLY otherwise."
  (declare (type request request))
  (with-octets-at (sap size) (octets start end)
    (persisting ()
      (attempt-waiting (0 nil timeout deadline :arm nil)
        (%reply-part (request-responder request) sap size deadline))))
  (values))

(defun request-cancelled-p (request)
  "Whether nobody awaits the answer any more. Answer all the same, in the cheapest way. Does not wait."
  (declare (type request request))
  (eql (check (attempt (%is-cancelled (request-responder request)))) 1))

(defun next-request (service request)
  "Takes the next request: makes it REQUEST. True, or nil when the service was stopped. Without interrupts between its coming and its being that."
  (declare (type request request))
  (let ((handle (handle-address service)))
    (with-words (out 5)
      (flet ((take (deadline)
               (without-interrupts
                 (let ((result (attempt (%service-receive handle deadline out))))
                   (when (eql result 0)
                     (setf (request-responder request) (sap-ref-64 out 16)
                           (request-pid request) (sap-ref-32 out 32)
                           (request-uid request) (sap-ref-32 out 36)
                           (request-taken request) t)
                     ;; There may be no room for them.
                     (unwind-protect
                          (setf (request-octets request) (sap-octets (sap-ref-sap out 0) (ldb (byte 62 0) (sap-ref-64 out 8))))
                       (attempt (%release handle))))
                   result))))
        (let ((result (wait-for handle (handle-spins service) nil #'take (lambda () (attempt (%arm handle))))))
          (etypecase result
            ((eql 0) t)
            (closed-error nil)
            (pelton-error (error result))))))))

(defun let-go (request)
  "Ends the call, if it was not answered. To be called without interrupts."
  (unless (zerop (request-responder request))
    (attempt (%close (request-responder request)))
    (setf (request-responder request) 0)))

(defun words-of (condition)
  (sb-ext:string-to-octets (handler-case (princ-to-string condition)
                             (error () (format nil "a ~a, which cannot be printed" (type-of condition))))
                           :external-format :utf-8))

(defun handle-request (handler request)
  (handler-case
      (let ((answer (funcall handler request)))
        (when (and (typep answer '(vector (unsigned-byte 8))) (plusp (request-responder request)))
          (reply request answer)))
    (error (condition)
      (when (plusp (request-responder request))
        (handler-case (fail request 1 (words-of condition))
          ;; The client has gone.
          (pelton-error ()))))))

(defvar *taking* nil "The request that this thread of SERVE's waits for.")

(defun serve (service handler &key (threads 1))
  "Has HANDLER answer each REQUEST, on so many threads, of which this is one, until STOP is called; then waits for the handlers at work.
HANDLER is a function of a request, which is good until it returns. What it answers, if it is a vector of bytes, is the reply, unless it has
called REPLY or FAIL itself; if it signals an error the call fails with 1 and the error's words; if it ends in any other way without an answer the
client is told CALL-ABANDONED. What is not to be answered, NOTIFY, comes to it too. Signals SYSTEM-ERROR, for instance when descriptors run
out, and what is no ERROR and has left a handler of another thread, for instance that its stack is exhausted. It can be called again then, and
after an interrupt that unwinds, for nothing has stopped the service."
  (declare (type service service))
  (let ((handler (coerce handler 'function)) (lock (sb-thread:make-mutex :name "pelton service")) (ended nil) (failure nil) (all '()))
    (labels ((take (request)
               (let ((*taking* request))
                 (catch 'ended
                   ;; From here on END wakes this thread, and before it was not too late to see that it has ended.
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
                       (let-go request))))))
             (end ()
               (setf ended t)
               (dolist (thread all)
                 (unless (eq thread sb-thread:*current-thread*)
                   (handler-case
                       (sb-thread:interrupt-thread thread (lambda ()
                                                            (when (and *taking* (not (request-taken *taking*)))
                                                              (throw 'ended nil))))
                     ;; It has ended already.
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

(defun stop (service &key drain)
  "Ends a service: SERVE returns when the handlers at work have. :DRAIN true: it answers what it has taken, and gives back what is asked from now on, so
that clients ask another process of the name, and no call fails or is carried out twice. Does not wait. Any thread, and also a handler."
  (declare (type service service))
  (check (attempt (%service-stop (handle-address service) (if drain 1 0))))
  (values))
