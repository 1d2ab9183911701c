;;;; Many publishers: one thread receives from the subscribers of a set.

(in-package #:pelton)

(define-handle subscriber-set
    (;; A cons of its subscribers' list, for the function that closes the set.
     (members (list '()) :type cons)
     ;; The values of a message that no caller has got yet.
     (found '() :type list)
     ;; The subscriber whose publisher has left last: RESUME-CHANNEL.
     (left nil)
     ;; What C writes: the subscriber, and a pelton_delivery, whose data is 0 if no message is received.
     (words (make-array (1+ (/ +sizeof-delivery+ 8)) :element-type 'word :initial-element 0)
            :type (simple-array word (*))))
  "The subscribers of many publishers, for which one thread waits: OPEN-SUBSCRIBER-SET. One thread at a time uses it.")

(defun make-subscriber-set (&key spins address)
  (let ((members (list '())))
    (%make-subscriber-set :spins spins :address address :members members
                          :shut (lambda (address)
                                  (prog1 (shut address)
                                    (dolist (member (shiftf (car members) '()))
                                      (setf (car (subscriber-home member)) 0)))))))

(defun open-subscriber-set (&key wait)
  "Opens a set without subscribers. :WAIT as of OPEN-SENDER is how the set waits, whatever its subscribers' own is.

The messages of a publisher arrive in order; between publishers there is no order. Those with messages take turns, of 64
messages each. Closing the set gives its subscribers back."
  (check (opening (out make-subscriber-set :spins (eq wait :spin))
           (%subscriber-set-open (ecase wait ((nil :block) +block+) (:spin +spin+)) out))))

(defmacro with-subscriber-set ((set &rest options) &body body)
  "Runs BODY with the set that OPEN-SUBSCRIBER-SET returns, and closes it however BODY is left."
  `(with-handle (,set (open-subscriber-set ,@options)) ,@body))

(defun add-subscriber (set subscriber)
  "Adds SUBSCRIBER to SET, which alone uses it until REMOVE-SUBSCRIBER, or until its publisher leaves: another use signals
WRONG-THREAD-ERROR. Only INFO works, and closing it removes it. Both use SET, so call them in the thread that uses SET.
Does not wait. Returns SET."
  (declare (type subscriber-set set) (type subscriber subscriber))
  (check (without-interrupts
           (let ((added (result (%subscriber-set-add (handle-address set) (handle-address subscriber)))))
             (when (eql added +ok+)
               (setf (car (subscriber-home subscriber)) (handle-address set))
               (push subscriber (car (subscriber-set-members set))))
             added)))
  set)

(defun members-of (set)
  "The subscribers of SET that are open: one that is closed has left it. Without interrupts."
  (setf (car (subscriber-set-members set)) (delete-if-not #'handle-open-p (car (subscriber-set-members set)))))

(defun leave-set (set subscriber)
  "Notes that SUBSCRIBER is not in SET any more. Without interrupts."
  (setf (car (subscriber-home subscriber)) 0
        (car (subscriber-set-members set)) (delete subscriber (car (subscriber-set-members set)))))

(defun remove-subscriber (set subscriber)
  "Removes SUBSCRIBER from SET. It keeps its place. Does not wait. Returns SUBSCRIBER. Signals REFUSED-ERROR if the set does
not have it."
  (declare (type subscriber-set set) (type subscriber subscriber))
  (check (without-interrupts
           (let ((removed (result (%subscriber-set-remove (handle-address set) (handle-address subscriber)))))
             (when (eql removed +ok+) (leave-set set subscriber))
             removed)))
  subscriber)

(defun find-in-set (set deadline)
  "Receives until DEADLINE, unless something was found that no caller has got. Returns a code. Without interrupts, so that
nothing is lost: a message becomes FOUND, and the end of a publisher UNSIGNALLED."
  (declare (type subscriber-set set) (type (signed-byte 64) deadline))
  (let ((words (subscriber-set-words set)))
    (with-pinned-objects (words)
      (let* ((sap (vector-sap words)) (delivery (sap+ sap 8)) (code +ok+))
        (declare (type (signed-byte 32) code))
        (when (or (subscriber-set-found set) (handle-unsignalled set))
          (return-from find-in-set +ok+))
        ;; Else the heap had no space for a copy of what is received.
        (when (zerop (delivery.data delivery))
          (setf (sap-ref-64 sap 0) 0
                code (%subscriber-set-receive (handle-address set) deadline sap delivery)))
        (let ((from (find (sap-ref-64 sap 0) (members-of set) :key #'handle-address)))
          (cond ((eql code +ok+)
                 (setf (subscriber-set-found set)
                       (list (sap-octets (int-sap (delivery.data delivery)) (ldb (byte 62 0) (delivery.size delivery)))
                             from (delivery.number delivery) (delivery.missed delivery))
                       (sap-ref-64 delivery 0) 0)
                 (%subscriber-set-release (handle-address set)))
                (from
                 (let ((condition (failure code)))
                   (setf (slot-value condition 'subscriber) from
                         (handle-unsignalled set) condition
                         (subscriber-set-left set) from
                         code +ok+)
                   (leave-set set from))))
          code)))))

(defmethod resume ((set subscriber-set) &key timeout)
  (add-subscriber set (resume (subscriber-set-left set) :timeout timeout)))

(defun take-found (set)
  (values-list (shiftf (subscriber-set-found set) '())))

(defun receive-from-set (set &key timeout)
  "Receives the next message of SET's subscribers, a fresh vector of its bytes. Waits up to TIMEOUT seconds; interrupts are
served within 50 ms. The other values are its subscriber, its number, and how many messages that subscriber has missed
directly before it. Returns NIL if the set is empty. If a publisher has left, signals what RECEIVE-DELIVERY would;
PELTON-ERROR-SUBSCRIBER is its subscriber, which is not in the set any more: close it, or RESUME it and add it again. While
RESUME waits, nothing is received from the others: give it a timeout of 0 between receives. For a PEER-DIED-ERROR the
restart RESUME-CHANNEL waits for the successor, and adds it. Signals TIMED-OUT with the restart WAIT-LONGER."
  (declare (type subscriber-set set))
  (persisting (:handle set)
    (if (without-interrupts (or (members-of set) (subscriber-set-found set)))
        (let ((code (attempt-waiting (nil nil timeout deadline) (find-in-set set deadline))))
          ;; An interrupt that is pending runs here: what was found comes next.
          (with-interrupts nil)
          (if (handle-unsignalled set) nil code))
        +ok+))
  (take-found set))

(defun try-receive-from-set (set)
  "As RECEIVE-FROM-SET, but never waits: returns NIL if there is no message."
  (declare (type subscriber-set set))
  (check (let ((result (attempt (find-in-set set +no-wait+))))
           (with-interrupts nil)
           (or (shiftf (handle-unsignalled set) nil) result)))
  (take-found set))

(defun next-of-set (set timeout)
  "As RECEIVE-FROM-SET, but no publisher's close is signalled."
  (loop
    (handler-case (return (receive-from-set set :timeout timeout))
      (closed-error ()))))

(defmacro do-set-deliveries ((octets set &key subscriber number missed timeout result) &body body)
  "Runs BODY with OCTETS bound to each message of SET's subscribers, a fresh vector, until each publisher has closed; then
returns RESULT. SUBSCRIBER, NUMBER and MISSED are variables for the values of RECEIVE-FROM-SET. Waits up to TIMEOUT
seconds for each. BODY is in a block named NIL. Conditions as RECEIVE-FROM-SET, except CLOSED-ERROR."
  (let ((from (gensym "SET")) (seconds (gensym "TIMEOUT")) (subscriber (or subscriber (gensym)))
        (number (or number (gensym))) (missed (or missed (gensym))))
    `(let ((,from ,set) (,seconds ,timeout))
       (loop
         (multiple-value-bind (,octets ,subscriber ,number ,missed) (next-of-set ,from ,seconds)
           (declare (ignorable ,subscriber ,number ,missed))
           (unless ,octets (return ,result))
           ,@body)))))
